"""Rules about scripts that end with 0 although they have failed, or have not trained."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from ddpjob_check.nodes import Function, dotted, is_main_guard, name_of, words_of
from ddpjob_check.options import literal
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Script
from ddpjob_check.values import STARTERS
from ddpjob_operator.job.launch import command

_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_ANY_FAILURE = {
    "", "Exception", "BaseException", "RuntimeError", "subprocess.CalledProcessError", "CalledProcessError",
    "torch.cuda.OutOfMemoryError", "torch.OutOfMemoryError",
}  # fmt: skip
_GO_ON = set(
    "print print_exc print_exception print_tb format_exc debug info warn warning error exception critical log echo "
    "secho write flush close finish destroy_process_group empty_cache".split()
)
"""Functions that neither end the script nor keep a failure for later."""


@rule("warning", wrong="def main():\n    train()    # and nothing calls it", right="def main():\n    train()\n\nmain()")
def nothing_runs(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only if the job is known. The script defines functions that train, and nothing outside of them calls one: the
    call of `main()` is missing, or its guard is misspelt (`if __name__ == "main":`) or not true because the command
    only imports the file (`python -c "import train"`). The job succeeds at once."""
    if not (job.known and any(job.imported or script.function(node) for node in _training(script))):
        return
    if any(getattr(node, "decorator_list", ()) for node in script.tree.body):
        return  # a decorator may run the function
    guards = [node for node in script.tree.body if isinstance(node, ast.If) and _is_misspelt(node, job)]
    if all(isinstance(node, _DEFINES) or node in guards or _is_plain(script, node) for node in script.tree.body):
        what = "nothing in this file calls its functions, so nothing is trained; call main() at its end"
        if guards:
            what = f"`{script.text_of(guards[0].test)}` is never true, so nothing is trained; write __name__ == "
            what += '"__main__"'
        if job.imported:
            what = "the command only imports this file and calls nothing in it, so nothing is trained; start the file"
        yield at(guards[0] if guards else script.tree.body[-1], what)


_DEFINES = ast.Import | ast.ImportFrom | Function | ast.ClassDef | ast.Pass


def _is_misspelt(node: ast.If, job: CheckedJob) -> bool:
    """True for `if __name__ == "main":`, and for any such guard in a file that is only imported."""
    if not is_main_guard(node.test) or node.orelse or not isinstance(node.test, ast.Compare):
        return False
    name = node.test.comparators[0]
    equals = isinstance(node.test.ops[0], ast.Eq)
    return equals and isinstance(name, ast.Constant) and (name.value != "__main__" or job.imported)


def _is_plain(script: Script, node: ast.stmt) -> bool:
    """True for a statement that certainly runs no function of this file: a docstring, or a plain assignment."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
        return False
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    own = {n.name for n in script.tree.body if isinstance(n, Function | ast.ClassDef)}
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    named = own & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    is_made = not isinstance(node, ast.Expr) and all(script.called(c).split(".")[0] in _MAKE_VALUES for c in calls)
    return is_text or (is_made and not named)


_MAKE_VALUES = set("argparse collections logging pathlib re torch typing".split())


@rule(
    "warning",
    wrong="try:\n    train()\nfinally:\n    sys.exit(0)",
    right="try:\n    train()\nfinally:\n    dist.destroy_process_group()",
)
def failure_exits_with_0(script: Script, job: CheckedJob) -> Iterator[Found]:
    """An exception in the training is lost in a `finally` with `sys.exit(0)` or `return`, in an `except Exception` that
    only prints it, or in `contextlib.suppress(Exception)`. The rank exits with 0, and a failed training counts as
    done."""
    for call in script.calls_to("contextlib.suppress"):
        block = script.parent(script.parent(call) or call)
        caught = any(dotted(kind) in _ANY_FAILURE for kind in call.args)
        if caught and isinstance(block, ast.With) and not _is_in_loop(script, block) and _trains(script, block.body):
            yield at(call, f"{script.text_of(call)} around the training: the rank exits with 0 although it has failed")
    for node in script.nodes:
        if not isinstance(node, ast.Try) or _is_in_loop(script, node):
            continue
        ways = [(node.finalbody, "finally")] if node.finalbody else []
        ways += [(h.body, "except") for h in node.handlers if dotted(h.type or ast.Name("")) in _ANY_FAILURE]
        for body, how in ways:
            end = _end_of(script, body, how)
            if end is not None and _trains(script, node.body):
                yield at(
                    end,
                    f"{script.text_of(end)} in `{how}`: the rank ends with 0 although its training has failed, and "
                    "the job counts as done; let the exception pass: `raise`",
                )


def _is_in_loop(script: Script, node: ast.AST) -> bool:
    return any(isinstance(parent, ast.For | ast.While) for _, parent in script.above(node))


def _end_of(script: Script, body: list[ast.stmt], how: str) -> ast.stmt | None:
    """Return the statement by which a block certainly hides an exception; None if the block may show it."""
    for statement in body:
        if isinstance(statement, ast.Return) and (how == "finally" or _is_lost(script, statement)):
            return statement
        call = getattr(statement, "value", getattr(statement, "exc", None))
        if _exits(script, call):
            return statement if _is_0(call) else None
        if how == "except" and not _goes_on(script, statement, body):
            return None
    return body[-1] if how == "except" and _is_end(script, body[-1]) else None


def _goes_on(script: Script, statement: ast.AST, body: list[ast.stmt]) -> bool:
    """True if a statement of a handler certainly neither ends the script nor keeps the failure for later."""
    if isinstance(statement, ast.If | ast.With):
        parts = [*statement.body, *getattr(statement, "orelse", ())]
        return all(_goes_on(script, part, body) for part in parts)
    if isinstance(statement, ast.Assign):
        inside = {node for part in body for node in ast.walk(part)}
        kept = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        reads = (node for node in script.nodes if isinstance(node, ast.Name) and node.id in kept)
        return len(kept) == len(statement.targets) and all(node in inside for node in reads)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and (functions := script.functions_called(call)):
        parts = [node for function in functions for node in ast.walk(function)]
        return not any(isinstance(part, ast.Raise) or script.called(part) in _EXITS for part in parts)
    is_printed = isinstance(call, ast.Constant) or (isinstance(call, ast.Call) and name_of(call.func) in _GO_ON)
    return is_printed or isinstance(statement, ast.Pass | ast.Import)


def _is_end(script: Script, last: ast.stmt) -> bool:
    """True if nothing looks at a failure after a handler: it is at the end of a function whose callers go on, or in no
    function."""
    function = script.function(last)
    if function is None:
        return True
    handled = script.parent(script.parent(last) or last)
    place = next((i for i, part in enumerate(function.body, 1) if part is handled), 0)
    after = function.body[place:]
    calls = [caller.call for caller in script.callers(function)]
    goes_on = all(_is_statement(script, call) and not _is_in_loop(script, call) for call in calls)
    return bool(place and calls) and goes_on and all(_goes_on(script, part, after) for part in after)


def _exits(script: Script, node: ast.AST | None) -> bool:
    """True for `sys.exit(…)`, `ctx.exit(…)` of click, and `SystemExit`, with or without arguments."""
    called = node.func if isinstance(node, ast.Call) else node
    is_exception = isinstance(called, ast.Name) and called.id == "SystemExit"
    is_method = isinstance(called, ast.Attribute) and called is not node and called.attr == "exit"
    return script.called(node) in _EXITS or is_exception or is_method


def _is_0(call: ast.AST | None) -> bool:
    given = call.args if isinstance(call, ast.Call) else []
    return not given or literal(given[0]) in (0, None)


def _is_lost(script: Script, end: ast.Return) -> bool:
    """True if all callers ignore what a function returns, or exit with it: `sys.exit(False)` exits with 0."""
    function = script.function(end)
    calls = [] if function is None else [caller.call for caller in script.callers(function)]
    exits = [call for call in calls if literal(end.value) in (0, None) and script.called(script.parent(call)) in _EXITS]
    return bool(calls) and all(_is_statement(script, call) or call in exits for call in calls)


@rule(
    "warning",
    wrong="p = mp.Process(target=train, args=(rank,))\np.start()\np.join()",
    right="mp.spawn(train, nprocs=2)    # raises if one fails; or: if p.exitcode: sys.exit(1)",
)
def process_failure_ignored(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only if the job is known. join() also returns if the process failed or was killed, and a pool keeps an exception
    until its result is requested. A script that checks neither exits with 0."""
    if not job.known:
        return
    for call in script.calls_to(*STARTERS) if not script.methods_called("join") else ():
        if literal(script.argument(call, "join", 3)) is False:
            yield at(
                call, f"{script.text_of(call)}: nothing calls join() on the result, so failed processes go unnoticed"
            )
    for call in script.starts if not script.mentions("exitcode", "sentinel", "is_alive") else ():
        target, _ = script.started(call) or (None, None)
        is_process = script.called(call).endswith("Process") or name_of(call.func) == "Process"
        if target is not None and is_process and _trains(script, script.functions_meant(target)):
            yield at(
                call,
                f"{script.text_of(call)}: nothing checks its exitcode, so a rank that fails counts as done; use "
                "mp.spawn, or end with sys.exit(1) if p.exitcode is not 0",
            )
            return
    for call in [c for name in _KEEPS_EXCEPTION for c in script.methods_called(name)]:
        is_asked = script.mentions(*_KEEPS_EXCEPTION[name_of(call.func)]) and not _is_statement(script, call)
        if (
            not is_asked
            and call.args
            and _keeps(script, call)
            and _trains(script, script.functions_meant(call.args[0]))
        ):
            yield at(
                call,
                f"{script.text_of(call)}: nothing reads its result, so an exception of the training is lost and "
                "the script exits with 0; call result() or get() on the returned object",
            )


# Methods of pools that keep an exception of their function → names with which a script reads the exception.
_KEEPS_EXCEPTION = {
    "submit": ("result", "exception", "add_done_callback"), "map": (), "apply_async": ("get", "error_callback"),
}  # fmt: skip


def _keeps(script: Script, call: ast.Call) -> bool:
    """True if a call keeps an exception until its result is read: submit, apply_async, or the map of an executor whose
    results are not read. The map of a multiprocessing.Pool raises the exception itself."""
    pools = script.origins(call.func.value) if isinstance(call.func, ast.Attribute) else []
    is_lazy = all(script.called(pool).endswith("Executor") for pool in pools)
    return name_of(call.func) != "map" or (is_lazy and _is_statement(script, call))


def _is_statement(script: Script, call: ast.Call) -> bool:
    return isinstance(script.parent(call), ast.Expr)


@rule(
    "warning",
    wrong='subprocess.run(["torchrun", "train.py"])',
    right='subprocess.run(["torchrun", "train.py"], check=True)',
)
def launcher_failure_ignored(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only if the job is known. subprocess.run, call and Popen raise nothing when the program fails, and os.system
    returns its status. A script that drops it ends with 0."""
    if not job.known or script.mentions("returncode", "check_returncode", "poll"):
        return
    for call, started in _started(script):
        results = script.methods_called("wait") if script.called(call) == _POPEN else [call]
        is_checked = script.called(call).endswith("check_call") or any(k.arg in ("check", None) for k in call.keywords)
        is_dropped = all(_is_statement(script, result) for result in results) or script.called(call) in _KEEP_OUTPUT
        is_kept = script.called(call) == "subprocess.run" and isinstance(script.parent(call), ast.Assign)
        if not is_checked and (is_dropped or is_kept):
            yield at(
                call,
                f"{script.text_of(call.func)}(…) starts {started.launcher}, and nothing checks its exit code, so a "
                "training that fails counts as done; use subprocess.run(…, check=True)",
            )


@rule(
    "warning",
    wrong='subprocess.run(["torchrun", "--standalone", "train.py"], check=True)',
    right='subprocess.run(["torchrun", "train.py"], check=True)',
)
def launcher_for_one_node(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only in a job of several nodes. A torchrun that the script starts has PET_NNODES of the job, and with
    `--standalone` each waits at its own address for the others, which never come. ddprun trains alone on each."""
    for call, started in _started(script) if job.known and (job.nodes or 1) > 1 else ():
        if "standalone" in started.options and started.options.get("nnodes") != "1":
            means = "trains alone" if started.launcher == "ddprun" else "waits for the others in vain"
            text = f"{started.launcher} --standalone is for one node, and the job has {job.nodes}: each {means}; "
            yield at(call, f"{text}leave it out: the job's variables name the nodes")


_POPEN = "subprocess.Popen"
_KEEP_OUTPUT = ("subprocess.getoutput", "os.popen")
_RUNNERS = ("subprocess.run", "subprocess.call", "subprocess.check_call", _POPEN, "os.system", *_KEEP_OUTPUT)


@functools.lru_cache(maxsize=1)
def _started(script: Script) -> list[tuple[ast.Call, command.Command]]:
    """Return the calls that start a launcher, with the started command. Calls of a Python script count too if this
    script does not train itself."""
    found = []
    for call in script.calls_to(*_RUNNERS):
        for origin in script.origins(call.args[0]) if call.args else ():
            started = command.of_container(_words(script, origin))
            is_alone = started.launcher == "python" and started.files and not _training(script)
            if started.has_torchrun_options or is_alone:
                found.append((call, started))
    return found


def _words(script: Script, node: object) -> list[str]:
    """Return the literal words of a command, from a list or from a line for a shell."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_word(script, one) for one in node.elts]
    return ["sh", "-c", _word(script, node)]


def _word(script: Script, node: object) -> str:
    """Return a word of a command, with `…` for each unknown value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_word(script, value) for value in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "python" if isinstance(node, ast.expr) and script.full_name(node) == "sys.executable" else "…"


def _training(script: Script) -> list[ast.Call]:
    """Return the script's calls that form a group or train."""
    return [*script.inits, *script.calls_to(DDP), *script.methods_called("backward")]


def _is_of_trainer(call: ast.Call) -> bool:
    """True for `trainer.train()` and `trainer.fit(…)`, of transformers and Lightning."""
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return "trainer" in words_of(owner) and name_of(call.func) in ("train", "fit")


@functools.lru_cache(maxsize=1)
def _all_training(script: Script) -> frozenset[ast.Call]:
    """Return the calls of `_training`, and calls that train in another file or process."""
    elsewhere = (call for call, _ in _started(script))
    return frozenset((*_training(script), *elsewhere, *filter(_is_of_trainer, script.calls)))


def _trains(script: Script, nodes: Iterable[ast.AST]) -> bool:
    """True if one of these statements or functions forms a group or trains, directly or in functions that it calls."""
    training, todo, seen = _all_training(script), [*nodes], set[ast.AST]()
    while todo:
        for call in (n for n in ast.walk(todo.pop()) if isinstance(n, ast.Call)):
            if call in training:
                return True
            started = script.started(call)
            called = [*script.functions_called(call), *(script.functions_meant(started[0]) if started else ())]
            todo += [function for function in called if function not in seen]
            seen.update(called)
    return False
