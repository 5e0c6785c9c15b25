"""Folders that each rank makes for itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import has_hidden_arguments, is_method, name_of, words_of
from ddpjob_check.ranks import at
from ddpjob_check.rule import Found, Job, rule
from ddpjob_check.script import DDP, Script

_OF_ITS_OWN = {"getpid", "mkdtemp", "TemporaryDirectory", "uuid1", "uuid4", "gettempdir"}
_TAKES_TURNS = {"lock", "first", "suppress"}


@rule("warning", wrong='os.makedirs("runs/1")', right='os.makedirs("runs/1", exist_ok=True)')
def folder_on_every_rank(script: Script, job: Job) -> Iterator[Found]:
    """Ranks that share a disk make the same folder at the same time: all but one end with a FileExistsError, also after
    `if not os.path.exists(…)`, because the folder appears between the two lines."""
    if job.has_one_rank or not _has_ranks(script, job):
        return
    for call in script.calls:
        path = _made(script, call)
        if path is None or _is_own(script, path) or _expects_it(script, call) or not script.on_every_rank(call):
            continue
        fix = "use os.makedirs(…, exist_ok=True)" if script.called(call) == "os.mkdir" else "add exist_ok=True"
        yield at(
            call,
            f"{script.text_of(call)}: every rank makes this folder, and all but the first end with FileExistsError, "
            f"also after a test whether it exists; {fix}, or make it on rank 0",
        )


def _has_ranks(script: Script, job: Job) -> bool:
    by_job = job.known and script.uses_torch and (job.by_torchrun or job.launcher == "ddprun")
    return bool(script.inits or script.calls_to(DDP) or (by_job and not script.uses_a_framework))


def _made(script: Script, call: ast.Call) -> ast.expr | None:
    """The folder that a call makes, where it must not exist."""
    name = script.called(call)
    if name in ("os.makedirs", "os.mkdir"):
        path = script.argument(call, "name" if name == "os.makedirs" else "path", 0)
    elif is_method(call, "mkdir") and isinstance(call.func, ast.Attribute) and _is_path(script, call.func.value):
        path = call.func.value
    else:
        return None
    may_exist = script.argument(call, "exist_ok", None if name == "os.mkdir" else 2)
    allowed = may_exist is not None and not (isinstance(may_exist, ast.Constant) and not may_exist.value)
    return None if allowed or has_hidden_arguments(call) else path


def _is_path(script: Script, node: ast.expr) -> bool:
    """True for Path("a"), Path("a") / "b", and names for these."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        node = node.left
    for origin in script.origins(node):
        while isinstance(origin, ast.BinOp) and isinstance(origin.op, ast.Div):
            origin = origin.left
        inner = script.origins(origin) if isinstance(origin, ast.Name) else [origin]
        if any(script.called(o).startswith("pathlib.") for o in inner):
            return True
    return False


def _is_own(script: Script, path: ast.expr) -> bool:
    """True for a path that differs by rank or by process."""
    made = [n for o in (path, *script.origins(path)) if isinstance(o, ast.expr) for n in ast.walk(o)]
    return script.depends_on_rank(path, by_arguments=True) or any(name_of(n) in _OF_ITS_OWN for n in made)


def _expects_it(script: Script, call: ast.Call) -> bool:
    """True if an error is handled, or the ranks come one after the other: try, suppress(…), FileLock(…)."""
    for child, parent in script.above(call):
        if isinstance(parent, ast.Try) and parent.handlers and child in parent.body:
            return True
        if isinstance(parent, ast.With | ast.AsyncWith):
            words = (words_of(name_of(n)) for item in parent.items for n in ast.walk(item.context_expr))
            if any(w & _TAKES_TURNS or any("lock" in x for x in w) for w in words):
                return True
    return False
