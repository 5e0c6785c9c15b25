"""Rules about starting processes: mp.spawn, and the launcher."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.data import LOADER
from ddpjob_check.nodes import Function, before, has_hidden_arguments, is_main_guard, leaves, name_of, text_in
from ddpjob_check.options import ScriptOptions
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, command_line, rule
from ddpjob_check.script import Script
from ddpjob_check.values import STARTERS

_LAUNCH = "torch.distributed.launch"


@rule("error", wrong="mp.spawn(train, nprocs=4)", right='if __name__ == "__main__":\n    mp.spawn(train, nprocs=4)')
def spawn_without_main_guard(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Each process of mp.spawn, and each DataLoader worker with the start method spawn, imports the script again.
    Without the guard it would start processes too, or join the group again, and Python raises an error."""
    yield from _spawned_workers(script, job)
    spawning = _functions_that_spawn(script)
    for call in script.calls:
        if script.function(call) is not None or isinstance(script.scope(call), ast.Lambda):
            continue
        if any(getattr(n, "id", "") == "__name__" for test in script.enclosing_tests(call) for n in ast.walk(test)):
            continue
        starts = (script.called(call) in STARTERS and not _forks(script, call)) or _starts_spawned(script, call)
        if starts or script.definition(call.func) in spawning:
            yield at(
                call,
                f'{script.text_of(call.func)}(…) outside `if __name__ == "__main__":`: each process that it starts '
                "imports this file, runs this line again and fails; put it under that guard",
            )


def _starts_spawned(script: Script, call: ast.Call) -> bool:
    """True for Process(…) and Pool(…) with the start method spawn, by get_context or set_start_method."""
    if name_of(call.func) not in ("Process", "Pool") or not script.mentions("start", "map", "starmap", "apply"):
        return False
    if script.called(call).startswith(("torch.multiprocessing.", "multiprocessing.")):
        return _spawns_by_default(script)
    origins = script.origins(call.func.value) if isinstance(call.func, ast.Attribute) else []
    return any(script.called(o) in _CONTEXTS for o in origins) and _is_spawn(script, call.func.value)  # type: ignore[attr-defined]


def _forks(script: Script, call: ast.Call) -> bool:
    """True if the start method may differ from spawn: mp.start_processes(…, start_method="fork")."""
    method = script.argument(call, "start_method", 5)
    return method is not None and script.texts(method) not in (["spawn"], ["forkserver"])


def _spawned_workers(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Yield findings for DataLoaders with spawned workers that are iterated when the file is imported."""
    by_default = _spawns_by_default(script)
    options = ScriptOptions(script, job.words)
    for call in script.calls_to(LOADER):
        workers = options.value(script.argument(call, "num_workers", 5) or ast.Constant(0))
        context = script.argument(call, "multiprocessing_context", 10)
        spawns = by_default if context is None else _is_spawn(script, context)
        if type(workers) is int and workers > 0 and spawns and any(_at_import(script, n) for n in _reads(script, call)):
            yield at(
                call,
                'DataLoader(…) with spawned workers outside `if __name__ == "__main__":`: each worker imports this '
                "file, runs its lines again and fails; put what trains under that guard",
            )


_CONTEXTS = ("torch.multiprocessing.get_context", "multiprocessing.get_context")
_SPAWNED = ("spawn", "forkserver")


def _spawns_by_default(script: Script) -> bool:
    """True if set_start_method("spawn") certainly runs."""
    names = ("torch.multiprocessing.set_start_method", "multiprocessing.set_start_method")
    calls = [c for c in script.calls_to(*names) if not any(True for _ in script.enclosing_tests(c))]
    return any(_is_spawn(script, method) for c in calls if (method := script.argument(c, "method", 0)) is not None)


def _is_spawn(script: Script, context: ast.expr) -> bool:
    """True for "spawn", and for get_context("spawn")."""
    methods = [
        script.argument(o, "method", 0) if isinstance(o, ast.Call) and script.called(o) in _CONTEXTS else o
        for o in script.origins(context)
    ]
    return all(isinstance(m, ast.Constant) and m.value in _SPAWNED for m in methods)


def _reads(script: Script, loader: ast.Call) -> Iterator[ast.AST]:
    """Yield places that iterate over a loader: for … in loader, enumerate(loader), iter(loader)."""
    for node in script.nodes:
        if isinstance(node, ast.For | ast.comprehension):
            read = node.iter
        elif isinstance(node, ast.Call) and name_of(node.func) == "iter" and node.args:
            read = node.args[0]
        else:
            continue
        named = [read, *(a for c in ast.walk(read) if isinstance(c, ast.Call) for a in c.args)]
        if any(loader in script.origins(n) for n in named):
            yield node


def _at_import(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """True if importing the file runs this line: no function or test of __name__ is around it."""
    if any(getattr(n, "id", "") == "__name__" for test in script.enclosing_tests(node) for n in ast.walk(test)):
        return False
    function = script.function(node)
    callers = [] if function is None or function in seen else script.callers(function)
    return function is None or any(
        _at_import(script, c.call, seen | {function}) for c in callers if not c.starts_process
    )


def _functions_that_spawn(script: Script) -> list[object]:
    """Return functions that certainly start processes, directly or through other functions."""
    spawning: list[object] = []
    todo = [script.function(c) for c in script.calls_to(*STARTERS) if not _forks(script, c)]
    while todo:
        function = todo.pop()
        if function is None or function in spawning:
            continue
        spawning.append(function)
        todo += [script.function(c.call) for c in script.callers(function) if not c.starts_process]
    return spawning


@rule(
    "error", wrong="def main(rank=0):\n    mp.spawn(main, nprocs=4)", right="def main():\n    mp.spawn(train, nprocs=4)"
)
def spawn_of_itself(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A function that spawns itself never trains: each of its processes starts more, until the node is full."""
    for call in script.calls_to(*STARTERS):
        function = script.function(call)
        target = script.argument(call, "fn", 0)
        if function is None or target is None or is_conditional(script, call, frozenset({function})):
            continue
        if function in script.functions_meant(target):
            yield at(
                call,
                f"mp.spawn({script.text_of(target)}) in {function.name} itself: every process starts more, without "
                "end; spawn a function that does the work of one rank",
            )


@rule("error", wrong="def train(): …\nmp.spawn(train, nprocs=4)", right="def train(rank): …\nmp.spawn(train, nprocs=4)")
def spawn_function_without_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """mp.spawn passes the number of the process as the first argument, before args: a function without a parameter for
    it raises a TypeError in every process."""
    for call in script.calls_to(*STARTERS):
        target, args = script.argument(call, "fn", 0), script.argument(call, "args", 1)
        functions = script.functions_meant(target) if target is not None else []
        given = 0 if args is None else len(args.elts) if isinstance(args, ast.Tuple) else None
        if len(functions) != 1 or has_hidden_arguments(call):
            continue
        accepts = _positional_max(functions[0])
        if accepts is not None and accepts < 1 + (given or 0):
            says = f"(i{', *args' if given else ''})"
            yield at(
                call,
                f"mp.spawn calls {functions[0].name}{says} with {1 + (given or 0)} arguments, the first of them the "
                f"process number, but it takes {accepts}; add a first parameter, rank",
            )


@rule(
    "error",
    wrong="mp.spawn(train, nprocs=torch.cuda.device_count())",
    right="mp.spawn(train, nprocs=torch.cuda.device_count() or 2)",
)
def spawn_without_gpu(script: Script, job: CheckedJob) -> Iterator[Found]:
    """In a job whose pods have no GPU torch.cuda.device_count() is 0: mp.spawn starts no process and returns, so the
    script ends without an error, and the job succeeds without a training."""
    for call in script.calls_to(*STARTERS) if job.gpus == 0 else ():
        count = script.argument(call, "nprocs", 2)
        counts_gpus = all(script.called(o) == "torch.cuda.device_count" for o in script.origins(count))
        if count is not None and counts_gpus and not is_conditional(script, call):
            yield at(
                count,
                f"nprocs={script.text_of(count)}: torch.cuda.device_count() is 0, because the job has no GPU, so "
                "mp.spawn starts no process and nothing is trained; add nvidia.com/gpu to resources.limits, or use "
                'int(os.environ["NPROC_PER_NODE"])',
            )


def runs_always(script: Script, node: ast.AST) -> bool:
    """True if each rank certainly runs this node."""
    return script.on_every_rank(node) and not is_conditional(script, node)


def is_conditional(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """True if a condition may skip a node or a call that leads to it, or if its exception may be handled."""
    if any(not is_main_guard(test) for test in script.enclosing_tests(node)):
        return True
    if any(isinstance(parent, ast.Try) for _, parent in script.above(node)):
        return True
    earlier = (s for child, parent in script.above(node) for s in before(parent, child))
    if any(isinstance(n, ast.If) and leaves(n.body) for s in earlier for n in ast.walk(s)):
        return True
    function = script.function(node)
    callers = [] if function is None or function in seen else script.callers(function)
    return any(is_conditional(script, c.call, seen | {function}) for c in callers if function)


def _positional_max(function: Function) -> int | None:
    """Return how many positional arguments a function takes at most; None: any number, or a decorator hides it."""
    if function.args.vararg or function.decorator_list:
        return None
    return len(function.args.posonlyargs) + len(function.args.args)


@rule("error", wrong="command: [python, train.py]", right="command: [torchrun, train.py]")
def launcher_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """With several processes per node a launcher starts them and tells each its rank. `python train.py` starts one,
    which has no RANK, and init_process_group raises a ValueError."""
    if job.launcher != "python" or (job.nproc or 1) == 1 or script.starts or script.mentions(*_STARTS_OTHERWISE):
        return
    if job.variables is not None and "RANK" in job.variables:
        return
    if script.uses_a_framework or any(name == "RANK" for name, _, _ in script.variables_set):
        return
    for call in script.inits:
        methods = script.texts(script.argument(call, "init_method", 1)) or ["env://"]
        own = any(script.argument(call, name, None) is not None for name in ("rank", "store"))
        asks = any(not is_main_guard(test) for test in script.enclosing_tests(call))
        hidden = has_hidden_arguments(call) or len(call.args) > 2
        if methods == ["env://"] and not (own or asks or hidden) and script.on_every_rank(call):
            yield at(
                call,
                f"{script.text_of(call.func)}(…): the job has {job.nproc} processes per node, but its command starts "
                f"one, without RANK; start it with torchrun: {command_line(('torchrun', *job.script, *job.words))}",
                "warning" if job.known and job.variables is None else "error",  # a shell may set RANK
            )
            return


_STARTS_OTHERWISE = (
    "subprocess", "Popen", "system", "fork", "forkserver", "execv", "execvp", "execve", "spawnv", "elastic_launch",
    "launch_agent", "notebook_launcher", "Process", "Pool", "ProcessPoolExecutor", "start_processes", "spawn",
)  # fmt: skip


@rule(
    "error",
    wrong='parser.add_argument("--local-rank", int(os.environ["LOCAL_RANK"]))',
    right='parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))',
)
def argument_value_for_name(script: Script, job: CheckedJob) -> Iterator[Found]:
    """The arguments after the name in add_argument are further names of the option, so a number or a type there raises
    an error."""
    if not script.mentions("argparse", "ArgumentParser"):
        return
    for call in script.methods_called("add_argument"):
        kind = script.argument(call, "type")
        wrong = [a for a in call.args[1:] if _is_value(script, a)]
        if kind is not None and _is_value(script, kind) and script.called(kind):
            wrong.append(kind)
        for node in wrong[:1]:
            name = script.text_of(call.args[0]) if call.args else "…"
            fix = "type=…" if isinstance(node, ast.Name) else "default=…"
            yield at(
                node,
                f"add_argument({name}, {script.text_of(node)}): argparse takes the second argument as another name of "
                f"the option and fails; write {fix}",
            )


def _is_value(script: Script, node: ast.expr) -> bool:
    """True for int(…), os.environ[…], a number, or a type without `type=`."""
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str)
    if isinstance(node, ast.Name):
        return node.id in ("int", "float", "bool")
    return bool(script.variable_read(node)) or script.called(node) in ("int", "float", "bool")


@rule(
    "warning",
    wrong="command: [python, -m, torch.distributed.launch, train.py]",
    right='command: [torchrun, train.py]        # train.py reads os.environ["LOCAL_RANK"]',
)
def launch_deprecated(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torch.distributed.launch warns at each start that it will be removed; torchrun takes the same options."""
    for node in script.nodes:
        imports = isinstance(node, ast.Import | ast.ImportFrom) and _imports_launch(node)
        if imports or _starts_launch(script, node):
            yield at(node, DEPRECATED)
            return


DEPRECATED = (
    'torch.distributed.launch is deprecated and will be removed; use torchrun, and os.environ["LOCAL_RANK"] '
    "in place of --local-rank"
)


def _starts_launch(script: Script, node: ast.AST) -> bool:
    """True if a text with torch.distributed.launch is a command that a call runs, and not a help text."""
    text = text_in(node)
    calls = [p for child, p in script.above(node) if isinstance(p, ast.Call) and child is not p.func]
    return (text == _LAUNCH or f"-m {_LAUNCH} " in text) and any(name_of(c.func) in _RUNNERS for c in calls)


_RUNNERS = {"run", "call", "check_call", "check_output", "Popen", "system", "execvp", "execv"}


def _imports_launch(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return any(a.name == _LAUNCH for a in node.names)
    return node.module == _LAUNCH or (
        node.module == "torch.distributed" and any(a.name == "launch" for a in node.names)
    )
