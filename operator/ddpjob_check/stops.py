"""What a training does when it is told to stop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.data import LOADER
from ddpjob_check.nodes import has_hidden_arguments, name_of
from ddpjob_check.ranks import at
from ddpjob_check.rule import Found, Job, rule
from ddpjob_check.script import Script

_SAVES_AT_A_STOP = (
    "ddpjob.should_stop",
    "ddpjob.group.stop.should_stop",
    "ddpjob.huggingface.StopTogether",
    "ddpjob.lightning.JobCallback",
)


@rule(
    "warning",
    wrong="command: [torchrun, train.py]    # DataLoader(dataset, num_workers=4), ddpjob.should_stop(step)",
    right="DataLoader(dataset, num_workers=4, worker_init_fn=ddpjob.ignore_sigterm)\n# or: command: [ddprun, train.py]",
)
def workers_get_sigterm(script: Script, job: Job) -> Iterator[Found]:
    """torchrun sends SIGTERM to the workers of a DataLoader as well. The loader raises when one of them ends, so a
    training that would save at a stop (a drain, a suspend, Ctrl-C) saves nothing."""
    if not job.by_torchrun or not _saves_at_a_stop(script):
        return
    for call in script.calls_to(LOADER):
        workers = script.argument(call, "num_workers", 5)
        if workers is not None and _is_some(script, workers) and _lets_workers_end(script, call):
            yield at(
                call,
                f"DataLoader(…, num_workers={script.text_of(workers)}) under torchrun: at a stop torchrun "
                "signals the workers as well, the loader raises, and nothing is saved; pass "
                "worker_init_fn=ddpjob.ignore_sigterm, or start the script with ddprun",
            )
    for call in script.calls:
        workers = script.argument(call, "dataloader_num_workers")
        if workers is not None and _is_some(script, workers):
            yield at(
                call,
                f"dataloader_num_workers={script.text_of(workers)} under torchrun: at a stop torchrun sends SIGTERM to "
                "the workers as well, the loader raises, and nothing is saved; ddpjob.ignore_sigterm cannot be given "
                "to the Trainer's own loader, so start the script with ddprun",
            )


def _saves_at_a_stop(script: Script) -> bool:
    """By the library, or by a handler of its own."""
    if script.calls_to(*_SAVES_AT_A_STOP):
        return True
    handlers = [_handler_of_sigterm(script, call) for call in script.calls_to("signal.signal")]
    return any(h is not None and name_of(h) not in ("SIG_IGN", "SIG_DFL") for h in handlers)


def _handler_of_sigterm(script: Script, call: ast.Call) -> ast.expr | None:
    number = script.argument(call, "signalnum", 0)
    is_sigterm = number is not None and name_of(number) == "SIGTERM"
    return script.argument(call, "handler", 1) if is_sigterm else None


def _is_some(script: Script, workers: ast.expr) -> bool:
    """Whether it is certainly a number above 0."""
    origins = script.origins(workers)
    numbers = [o.value for o in origins if isinstance(o, ast.Constant) and isinstance(o.value, int)]
    counts = [o for o in origins if script.called(o) in ("os.cpu_count", "multiprocessing.cpu_count")]
    return len(numbers) + len(counts) == len(origins) and all(number > 0 for number in numbers)


def _lets_workers_end(script: Script, call: ast.Call) -> bool:
    """Whether no function of its workers can have them ignore the signal: there is none, or it does other things."""
    if has_hidden_arguments(call):
        return False
    given = script.argument(call, "worker_init_fn", 10)
    if given is None or (isinstance(given, ast.Constant) and given.value is None):
        return True
    defined = script.definition(given)
    names = {name_of(node) for node in ast.walk(defined)} if defined is not None else None
    return names is not None and names.isdisjoint({"signal", "ignore_sigterm"})
