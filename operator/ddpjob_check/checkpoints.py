"""Rules about folders and checkpoints: which rank writes them, what is saved, and to which device it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from ddpjob_check.groups import backends
from ddpjob_check.nodes import (
    Function,
    dotted,
    has_hidden_arguments,
    is_method,
    name_of,
    parameters_of,
    text_in,
    words_in,
)
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Script

_OF_ITS_OWN = {"getpid", "mkdtemp", "TemporaryDirectory", "uuid1", "uuid4", "gettempdir"}
_TAKES_TURNS = {"lock", "first", "suppress"}


@rule("warning", wrong='os.makedirs("runs/1")', right='os.makedirs("runs/1", exist_ok=True)')
def folder_on_every_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Ranks that share a disk create the same folder at the same time. All but one fail with FileExistsError, even
    after `if not os.path.exists(…)`, because the folder appears between the two lines."""
    by_job = job.known and script.uses_torch and (job.by_torchrun or job.launcher == "ddprun")
    has_ranks = script.inits or script.calls_to(DDP) or (by_job and not script.uses_a_framework)
    if job.has_one_rank or not has_ranks:
        return
    for call in script.calls:
        path = _made(script, call)
        if path is None or _is_own(script, path) or _expects_it(script, call) or not script.on_every_rank(call):
            continue
        fix = "use os.makedirs(…, exist_ok=True)" if script.called(call) == "os.mkdir" else "add exist_ok=True"
        yield at(
            call,
            f"{script.text_of(call)}: every rank creates this folder, and all but the first fail with FileExistsError, "
            f"even after a check that it does not exist; {fix}, or create it on rank 0",
        )


def _made(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the folder that a call creates; None if the folder may exist already."""
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
    """True for Path("a"), Path("a") / "b", and names whose value is such a path."""
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
    """True for a path that contains the rank, or something of one process only: its pid, a temporary folder."""
    made: list[ast.AST] = [path]
    for _ in range(_DEPTH_MAX):
        named = [o for m in made if isinstance(m, ast.Name) for o in script.origins(m)]
        made = [n for o in (*made, *named) if isinstance(o, ast.expr) for n in ast.walk(o)][:_PARTS_MAX]
    return script.depends_on_rank(path, by_arguments=True) or any(name_of(n) in _OF_ITS_OWN for n in made)


def _expects_it(script: Script, call: ast.Call) -> bool:
    """True if the script handles FileExistsError (try, suppress), or if the ranks take turns (FileLock)."""
    for child, parent in script.above(call):
        if isinstance(parent, ast.Try) and parent.handlers and child in parent.body:
            return True
        if isinstance(parent, ast.With | ast.AsyncWith):
            words = {word for item in parent.items for word in words_in(item.context_expr)}
            if words & _TAKES_TURNS or any("lock" in word for word in words):
                return True
    return False


_WRAPPERS = {DDP, "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.compile", "torch.nn.DataParallel"}
_DEVICE_WORDS = ("cuda", "gpu", "device", "cpu")


# ---------------------------------------------------------------- checkpoints


@rule(
    "warning",
    wrong='torch.save(model.module.state_dict(), "model.pt")',
    right='if rank == 0:\n    torch.save(model.module.state_dict(), "model.pt")',
)
def save_on_every_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """All ranks hold the same parameters. If all write them into one file at once, the file may be damaged."""
    if not script.is_distributed or job.has_one_rank:
        return
    for call in script.calls_to("torch.save"):
        path = script.argument(call, "f", 1)
        if path is None or script.depends_on_rank(path, by_arguments=True) or _is_buffer(script, path):
            continue
        if script.on_every_rank(call):
            yield at(
                call,
                f"torch.save(…, {script.text_of(path)}): every rank writes the same file at the same time; save on "
                "rank 0 only",
            )


@rule("warning", wrong='torch.save(model, "model.pt")', right='torch.save(model.module.state_dict(), "model.pt")')
def save_whole_module(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A pickled module names the classes of your files and holds the DDP wrapper: it loads only with
    weights_only=False, and not after a rename."""
    if not script.is_distributed:
        return
    for call in script.calls_to("torch.save"):
        what = script.argument(call, "obj", 0)
        if what is not None and is_module(script, what):
            yield at(
                call,
                f"torch.save({script.text_of(what)}, …) saves the whole module: loading it needs weights_only=False "
                "and the same source files; save its state_dict() (of .module under DDP)",
            )


def is_module(script: Script, value: ast.expr) -> bool:
    """True if a value is certainly an nn.Module: an instance of a class of torch or of this file, also after .to()."""
    todo, seen = [value], set[object]()
    while todo:
        for origin in script.origins(todo.pop()):
            if origin in seen:
                continue
            seen.add(origin)
            if isinstance(origin, ast.Call) and isinstance(origin.func, ast.Attribute) and origin.func.attr in _MOVES:
                todo.append(origin.func.value)
            elif not _makes_a_module(script, origin):
                return False
    return True


def _makes_a_module(script: Script, origin: object) -> bool:
    if isinstance(origin, ast.Attribute):
        return origin.attr == "module" and any(script.called(o) == DDP for o in script.origins(origin.value))
    if not isinstance(origin, ast.Call):
        return False
    defined = script.definition(origin.func)
    if isinstance(defined, ast.ClassDef):
        return any(script.full_name(b) == "torch.nn.Module" for b in defined.bases)
    name = script.called(origin)
    return (
        name in _WRAPPERS
        or name.startswith("torchvision.models.")
        or (name.startswith("torch.nn.") and name.count(".") == 2 and name[9:10].isupper())
    )


_MOVES = {"to", "cuda", "cpu", "train", "eval", "half", "float", "double"}


@rule(
    "warning",
    wrong='model = DDP(net)\ntorch.save(model.state_dict(), "m.pt")\nnet.load_state_dict(torch.load("m.pt"))',
    right='model = DDP(net)\ntorch.save(model.module.state_dict(), "m.pt")\nnet.load_state_dict(torch.load("m.pt"))',
)
def state_of_wrapper(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Names in the state of a DDP model begin with `module.`, those of the network inside do not. A state saved from
    one fails to load into the other (“Missing key(s)”), or with strict=False nothing is loaded."""
    if script.uses_a_framework or script.mentions("consume_prefix_in_state_dict_if_present", "removeprefix"):
        return
    if any("module." in text_in(node) for node in script.nodes) or not script.calls_to(DDP):
        return
    saves = [(state, place) for call in script.calls_to("torch.save") for state, place in _states_saved(script, call)]
    saved = [(state, place) for state, place in saves if not _is_asked_for(script, state)]
    for load in script.methods_called("load_state_dict"):
        into = load.func.value if isinstance(load.func, ast.Attribute) else None
        value = script.argument(load, "state_dict", 0)
        of, loaded = "" if _is_asked_for(script, load) else _level(script, into, load), _loaded(script, value)
        for state, place in saved if of and loaded else ():
            level = _level(script, state.func.value, state) if isinstance(state.func, ast.Attribute) else ""
            if loaded and level and level != of and _is_the_same_file(script, place, loaded):
                wrapped, plain = (state, load) if level == "wrapped" else (load, state)
                model = script.text_of(wrapped.func.value) if isinstance(wrapped.func, ast.Attribute) else "model"
                yield at(
                    wrapped,
                    f"{script.text_of(wrapped.func)}(…) uses the DDP wrapper, whose names begin with module., and "
                    f"line {plain.lineno} uses the network inside; use {model}.module.{name_of(wrapped.func)}(…)",
                )
                break


def _is_asked_for(script: Script, call: ast.Call) -> bool:
    """True if a condition decides which state is taken, such as `if isinstance(model, DDP)`."""
    return any(words_in(test) & _ASKS for test in script.enclosing_tests(call))


_ASKS = {"ddp", "distributed", "gpus", "hasattr", "isinstance", "module", "multi", "parallel", "world"}


class _Place(NamedTuple):
    """The place of a state: a file, and the key in the file's dict; "" if the state is the whole file."""

    path: ast.expr
    key: str


def _states_saved(script: Script, save: ast.Call) -> Iterator[tuple[ast.Call, _Place]]:
    """Yield each state_dict() call whose result this torch.save gets, directly or in a dict, with its file and key."""
    what, path = script.argument(save, "obj", 0), script.argument(save, "f", 1)
    for origin in script.origins(what) if path is not None else ():
        if isinstance(origin, ast.Call) and is_method(origin, "state_dict") and path:
            yield origin, _Place(path, "")
        elif isinstance(origin, ast.Dict):
            for key, value in zip(origin.keys, origin.values, strict=True):
                for state in script.origins(value):
                    if isinstance(state, ast.Call) and is_method(state, "state_dict") and key is not None and path:
                        yield state, _Place(path, text_in(key))


def _loaded(script: Script, value: ast.expr | None) -> _Place | None:
    """Return the place that torch.load reads a value from; None if the value is not loaded."""
    for origin in script.origins(value):
        key, inner = "", origin
        if isinstance(origin, ast.Subscript):
            key, inner = text_in(origin.slice), next(iter(script.origins(origin.value)), origin)
        if isinstance(inner, ast.Call) and script.called(inner) == "torch.load":
            path = script.argument(inner, "f", 0)
            return None if path is None else _Place(path, key)
    return None


def _is_the_same_file(script: Script, saved: _Place, loaded: _Place) -> bool:
    """True if both paths are equal, or if the loaded file is named like a checkpoint to resume from."""
    if saved.key != loaded.key:
        return False
    if ast.dump(saved.path) == ast.dump(loaded.path):
        return True
    if {o for o in script.origins(saved.path) if isinstance(o, ast.expr)} & set(script.origins(loaded.path)):
        return True
    texts = script.texts(saved.path)
    return bool(texts and texts == script.texts(loaded.path)) or bool(words_in(loaded.path) & _GOES_ON)


_GOES_ON = {"resume", "resumed", "latest"}


def _level(script: Script, model: ast.expr | None, place: ast.AST, depth: int = 0) -> str:
    """Return "wrapped" (by DDP) or "plain" for a model at this line; "" if this is uncertain."""
    if isinstance(model, ast.Attribute) and model.attr == "module":
        return "plain"
    if not isinstance(model, ast.Name | ast.Attribute) or depth > _DEPTH_MAX:
        return ""
    function, text = script.function(place), dotted(model)
    sets = [n for n in script.nodes if isinstance(n, ast.Assign) and any(dotted(t) == text for t in n.targets)]
    here = [n for n in sets if script.function(n) is function]
    if here:
        at_place = (getattr(place, "lineno", 0), getattr(place, "col_offset", 0))
        earlier = [n for n in here if (n.end_lineno or 0, n.end_col_offset or 0) < at_place]
        return _level_after(script, text, earlier, here)
    if function is not None and isinstance(model, ast.Name) and model.id in parameters_of(function):
        return _level_given(script, function, model.id, depth)
    return _level_elsewhere(script, model, function, sets, depth)


_DEPTH_MAX = 4
_PARTS_MAX = 200


def _level_after(script: Script, text: str, before: list[ast.Assign], here: list[ast.Assign]) -> str:
    """Return "wrapped" or "plain" for a model after its assignments `before`. here: all assignments in the function."""
    last = max(before, key=lambda n: n.lineno, default=None)
    if last is None:
        return ""
    if script.called(last.value) == DDP:
        return "wrapped"
    if any(script.called(n.value) == DDP for n in before):
        return ""
    becomes = any(script.called(n.value) == DDP for n in here)
    given = any(dotted(a) == text for call in script.calls_to(DDP) for a in call.args[:1])
    makes = all(_makes_a_module(script, o) and script.called(o) != DDP for o in script.origins(last.value))
    return "plain" if becomes or given or makes else ""


def _level_given(script: Script, function: Function, name: str, depth: int) -> str:
    """Return "wrapped" or "plain" for a parameter, if all callers pass the same kind of model; else ""."""
    levels = set()
    for caller in script.callers(function):
        given = script.passed(caller.call, function, name)
        levels.add("" if caller.starts_process else _level(script, given, caller.call, depth + 1))
    return levels.pop() if len(levels) == 1 else ""


def _level_elsewhere(
    script: Script, model: ast.expr, function: Function | None, sets: list[ast.Assign], depth: int
) -> str:
    """Return "wrapped" or "plain" for a model that another function, or the module, assigns: its kind when the
    assigning code calls this function, or at the end of that code if it makes no such call."""
    setting = {script.function(n) for n in sets}
    if len(setting) != 1 or function is None:
        return "wrapped" if all(script.called(o) == DDP for o in script.origins(model)) else ""
    where = setting.pop()
    calls = [c.call for c in script.callers(function)]
    while calls and depth < _DEPTH_MAX and not any(script.function(c) is where for c in calls):
        depth += 1
        calls = [c.call for call in calls if (f := script.function(call)) is not None for c in script.callers(f)]
    inside = [c for c in calls if script.function(c) is where]
    lines = [c.lineno for c in inside] or [END]
    levels = {_level_after(script, dotted(model), [n for n in sets if n.lineno < line], sets) for line in lines}
    return levels.pop() if len(levels) == 1 else ""


END = 10**9


@rule("warning", wrong='state = torch.load("model.pt")', right='state = torch.load("model.pt", map_location="cpu")')
def load_without_map_location(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torch.load puts tensors on the device that they were saved from: all ranks of a node load onto GPU 0, whose
    memory may not suffice."""
    uses_gpus = "nccl" in backends(script, job) or script.mentions("cuda", "device_ids") or job.gpus
    if not script.is_distributed or job.gpus == 0 or job.has_one_rank or not uses_gpus:
        return
    for call in script.calls_to("torch.load"):
        path = script.argument(call, "f", 0)
        if path is None or script.argument(call, "map_location", 1) is not None or has_hidden_arguments(call):
            continue
        if _is_buffer(script, path) or any(_speaks_of_device(test) for test in script.enclosing_tests(call)):
            continue
        if script.on_every_rank(call):
            yield at(
                call,
                f"torch.load({script.text_of(path)}) without map_location puts the tensors of all ranks on the GPU "
                'that saved them, mostly GPU 0; pass map_location="cpu", or this rank\'s device',
            )


def _speaks_of_device(test: ast.expr) -> bool:
    """True for `if args.gpu is None: load(path)`, because another branch probably loads with a device."""
    return any(word in name_of(n).lower() for n in ast.walk(test) for word in _DEVICE_WORDS)


def _is_buffer(script: Script, path: ast.expr) -> bool:
    """True for a buffer in memory, or a temporary file that only this process has."""
    own = {"io.BytesIO", "tempfile.NamedTemporaryFile", "tempfile.TemporaryFile", "tempfile.mkstemp"}
    return any(script.called(o) in own for o in script.origins(path))
