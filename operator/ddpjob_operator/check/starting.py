"""How the processes start: mp.spawn, the launcher, and the arguments that it passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_operator.check.nodes import Function, leaves, name_of
from ddpjob_operator.check.ranks import at
from ddpjob_operator.check.rule import Found, Job
from ddpjob_operator.check.script import Script
from ddpjob_operator.check.values import STARTERS

_LAUNCH = "torch.distributed.launch"


def spawn_without_main_guard(script: Script, job: Job) -> Iterator[Found]:
    """mp.spawn(…), or a function that calls it, while the file is being imported."""
    spawning = _functions_that_spawn(script)
    for call in script.calls:
        if script.function(call) is not None or _is_under_main_guard(script, call) or _is_in_lambda(script, call):
            continue
        if script.called(call) in STARTERS or script.definition(call.func) in spawning:
            yield at(
                call,
                f'{script.text_of(call.func)}(…) outside `if __name__ == "__main__":`: each process that it starts '
                "imports this file, comes here, and fails; put it under that guard",
            )


def _functions_that_spawn(script: Script) -> list[object]:
    """The functions that certainly start processes when they are called, also through others."""
    found: list[object] = []
    todo = [script.function(c) for c in script.calls_to(*STARTERS)]
    while todo:
        function = todo.pop()
        if function is None or function in found:
            continue
        found.append(function)
        todo += [script.function(c.call) for c in script.callers(function) if not c.starts_process]
    return found


def _is_under_main_guard(script: Script, call: ast.Call) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == "__name__" for test in script.enclosing_tests(call) for n in ast.walk(test)
    )


def _is_in_lambda(script: Script, call: ast.Call) -> bool:
    return isinstance(script.scope(call), ast.Lambda)


def spawn_of_itself(script: Script, job: Job) -> Iterator[Found]:
    """def main(): mp.spawn(main)."""
    for call in script.calls_to(*STARTERS):
        function = script.function(call)
        target = script.argument(call, "fn", 0)
        if function is None or target is None or not _always_comes(script, call, function):
            continue
        if function in script.functions_meant(target):
            yield at(
                call,
                f"mp.spawn({script.text_of(target)}) in {function.name} itself: every process starts others, without "
                "end; spawn a function that does the work of one rank",
            )


def _always_comes(script: Script, call: ast.Call, function: Function) -> bool:
    """Nothing decides: no condition around it, and none before it that leaves."""
    if any(True for _ in script.enclosing_tests(call)) or any(isinstance(p, ast.Try) for _, p in script.above(call)):
        return False
    before = [s for s in function.body if s.lineno < call.lineno]
    return not any(isinstance(n, ast.If) and leaves(n.body) for s in before for n in ast.walk(s))


def spawn_function_without_rank(script: Script, job: Job) -> Iterator[Found]:
    """def train(): …; mp.spawn(train, nprocs=4)."""
    for call in script.calls_to(*STARTERS):
        target, args = script.argument(call, "fn", 0), script.argument(call, "args", 1)
        functions = script.functions_meant(target) if target is not None else []
        given = 0 if args is None else len(args.elts) if isinstance(args, ast.Tuple) else None
        if len(functions) != 1 or script.has_hidden_arguments(call):
            continue
        accepts = _positional_max(functions[0])
        if accepts is not None and accepts < 1 + (given or 0):
            says = f"(i{', *args' if given else ''})"
            yield at(
                call,
                f"mp.spawn calls {functions[0].name}{says} with {1 + (given or 0)} arguments, the first of them the "
                f"number of the process, and it takes {accepts}; add a first parameter, rank",
            )


def _positional_max(function: Function) -> int | None:
    """How many positional arguments a function takes; None: any number, or a decorator decides."""
    if function.args.vararg or function.decorator_list:
        return None
    return len(function.args.posonlyargs) + len(function.args.args)


def argument_value_for_name(script: Script, job: Job) -> Iterator[Found]:
    """add_argument("--x", int(os.environ["X"])): a value where a name or type belongs."""
    if not script.mentions("argparse", "ArgumentParser"):
        return
    for call in script.methods_called("add_argument"):
        kind = script.argument(call, "type")
        wrong = [a for a in call.args[1:] if _is_value(script, a)]
        if kind is not None and _is_value(script, kind) and script.called(kind):
            wrong.append(kind)
        for node in wrong[:1]:
            name = script.text_of(call.args[0]) if call.args else "…"
            mend = "type=…" if isinstance(node, ast.Name) else "default=…"
            yield at(
                node,
                f"add_argument({name}, {script.text_of(node)}): argparse takes this for another name of the option, "
                f"or for its type, and fails; write {mend}",
            )


def _is_value(script: Script, node: ast.expr) -> bool:
    """int(…), os.environ[…], a number, or a type without `type=`."""
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str)
    if isinstance(node, ast.Name):
        return node.id in ("int", "float", "bool")
    return bool(script.variable_read(node)) or script.called(node) in ("int", "float", "bool")


def local_rank_one_spelling(script: Script, job: Job) -> Iterator[Found]:
    """add_argument("--local_rank") without "--local-rank", which torch.distributed.launch passes."""
    launched = job.launcher.startswith(_LAUNCH) or job.launcher == "launch.py"
    by_variable = any(script.variable_read(n) == "LOCAL_RANK" for n in script.nodes)
    if (
        "use_env" in job.launcher_options
        or not script.is_distributed
        or (not launched and (job.launcher or by_variable))
    ):
        return
    for call in script.methods_called("add_argument"):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if "--local_rank" in names and "--local-rank" not in names:
            yield Found(
                call.lineno,
                'add_argument("--local_rank"): since torch 2.0 torch.distributed.launch passes --local-rank, and '
                'argparse refuses it; add both: add_argument("--local-rank", "--local_rank", …)',
                "error" if launched else None,
                call.col_offset + 1,
            )


def launch_deprecated(script: Script, job: Job) -> Iterator[Found]:
    """subprocess.run(["python", "-m", "torch.distributed.launch", …]); a job's own command is read by job.py."""
    for node in script.nodes:
        imports = isinstance(node, ast.Import | ast.ImportFrom) and _imports_launch(node)
        if imports or (isinstance(node, ast.Constant) and _is_command(node.value) and _is_run(script, node)):
            yield at(node, DEPRECATED)
            return


DEPRECATED = (
    'torch.distributed.launch is deprecated and will go; use torchrun, and os.environ["LOCAL_RANK"] in place of '
    "--local-rank"
)


def _is_command(text: object) -> bool:
    return isinstance(text, str) and (text == _LAUNCH or f"-m {_LAUNCH} " in text)


def _is_run(script: Script, node: ast.AST) -> bool:
    """Whether a text is what a call starts; help and messages may name it."""
    calls = [p for child, p in script.above(node) if isinstance(p, ast.Call) and child is not p.func]
    return any(name_of(c.func) in _RUNNERS for c in calls)


_RUNNERS = {"run", "call", "check_call", "check_output", "Popen", "system", "execvp", "execv"}


def _imports_launch(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return any(a.name == _LAUNCH for a in node.names)
    return node.module == _LAUNCH or (
        node.module == "torch.distributed" and any(a.name == "launch" for a in node.names)
    )
