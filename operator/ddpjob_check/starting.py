"""Rules about starting processes: mp.spawn, and the launcher."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import Function, before, has_hidden_arguments, is_main_guard, leaves
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, command_line, rule
from ddpjob_check.script import Script
from ddpjob_check.values import STARTERS


@rule("error", wrong="mp.spawn(train, nprocs=4)", right='if __name__ == "__main__":\n    mp.spawn(train, nprocs=4)')
def spawn_without_main_guard(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A process of mp.spawn imports the script again. Without the guard it would start processes too, and Python raises
    an error."""
    spawning = _functions_that_spawn(script)
    for call in script.calls:
        if script.function(call) is not None or isinstance(script.scope(call), ast.Lambda):
            continue
        if any(getattr(n, "id", "") == "__name__" for test in script.enclosing_tests(call) for n in ast.walk(test)):
            continue
        starts = script.called(call) in STARTERS and not _forks(script, call)
        if starts or script.definition(call.func) in spawning:
            yield at(
                call,
                f'{script.text_of(call.func)}(…) outside `if __name__ == "__main__":`: each process that it starts '
                "imports this file, runs this line again and fails; put it under that guard",
            )


def _forks(script: Script, call: ast.Call) -> bool:
    """True if a start method other than spawn may be given: mp.start_processes(…, start_method="fork")."""
    method = script.argument(call, "start_method", 5)
    return method is not None and script.texts(method) not in (["spawn"], ["forkserver"])


def _functions_that_spawn(script: Script) -> list[object]:
    """Return functions that certainly start processes when called, directly or by others."""
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


def is_conditional(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """True if a condition around a node, before it or on the way to it may skip it, or a handler takes its
    exception."""
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
                f"{script.text_of(call.func)}(…): the job has {job.nproc} processes per node, and its command starts "
                f"one, without RANK; start it with torchrun: {command_line(('torchrun', *job.script, *job.words))}",
                "warning" if job.known and job.variables is None else "error",  # a shell may set it
            )
            return


_STARTS_OTHERWISE = (
    "subprocess", "Popen", "system", "fork", "forkserver", "execv", "execvp", "execve", "spawnv", "elastic_launch",
    "launch_agent", "notebook_launcher", "Process", "Pool", "ProcessPoolExecutor", "start_processes", "spawn",
)  # fmt: skip
