"""Rules about --local_rank, which only torch.distributed.launch passes to scripts."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence

from ddpjob_check.groups import backends
from ddpjob_check.nodes import bindings_in, is_main_guard, is_true, name_of, text_in
from ddpjob_check.options import UNKNOWN, literal
from ddpjob_check.ranks import at
from ddpjob_check.reached import Paths
from ddpjob_check.rule import CheckedJob, Found, Severity, command_line, rule
from ddpjob_check.script import INIT, Script
from ddpjob_operator.job.launch.command import arguments_behind_script

_LAUNCH = "torch.distributed.launch"
_OLD, _NEW = "--local_rank", "--local-rank"


def command_that_passes(script: Sequence[str], option: ast.Call, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a script, or -m and a module, and passes the local rank as this option. A shell
    passes the old spelling, because torch.distributed.launch passes only --local-rank since torch 2.0."""
    if _NEW in _names(option):
        return ["python", "-m", _LAUNCH, *script, *arguments_behind_script(arguments)]
    words = [*map(shlex.quote, script), f"{_OLD}=$LOCAL_RANK", *map(shlex.quote, arguments)]
    return ["torchrun", "--no-python", "sh", "-c", f"exec python {' '.join(words)}"]


def word_that_passes(option: ast.Call) -> str:
    """Return the argument that passes the local rank under ddprun, which replaces torchrun's macro ${local_rank}."""
    return f"{_NEW if _NEW in _names(option) else _OLD}=${{local_rank}}"


def _recipe(job: CheckedJob, option: ast.Call) -> str:
    """Return the line `command: […]` that starts the script and passes the option."""
    return command_line(command_that_passes(job.script, option, job.words))


@rule(
    "warning",
    wrong='parser.add_argument("--local_rank", type=int)',
    right='parser.add_argument("--local-rank", "--local_rank", type=int)',
)
def local_rank_one_spelling(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torch.distributed.launch passes --local-rank since torch 2.0 and passed --local_rank before: a script with only
    the old one, or with neither, exits with “unrecognized arguments” (exit code 2). The new one alone works with all
    versions that DDPJob supports. torchrun passes none, so it must not be required there."""
    if _launch_passes_it(job):
        yield from _refuses_what_is_passed(script, job)
    elif job.by_torchrun or job.launcher == "ddprun":
        yield from _requires_what_is_not_passed(script, job)
    elif not job.launcher and script.is_distributed and not _reads_local_rank(script):
        calls = filter(_has_only_the_old_name, _options(script))
        yield from (_one_spelling(call, _recipe(job, call)) for call in calls)


def _refuses_what_is_passed(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Yield findings if the parser would refuse the --local-rank that torch.distributed.launch passes."""
    if not script.methods_called("parse_known_args") and not script.mentions("ignore_unknown_options"):
        options = list(_options(script))
        yield from (_one_spelling(c, _recipe(job, c), "error") for c in filter(_has_only_the_old_name, options))
        if not any(name.startswith("--local") for call in script.calls for name in _names(call)):
            yield from (
                at(
                    call,
                    f"{script.text_of(call)}: torch.distributed.launch passes --local-rank, which is not declared, and "
                    "argparse refuses it; start it with torchrun, which passes nothing, or add --use-env",
                    "error",
                )
                for call in script.methods_called("parse_args")
                if _knows_all_options(script, call)
            )


def _requires_what_is_not_passed(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Yield findings for a required option, because the launcher does not pass it."""
    for call in () if _is_given(job) else _required(script):
        yield at(
            call,
            f"--local-rank is required, and {job.launcher} does not pass it, so argparse exits with an error. Two "
            f"fixes: with the script unchanged: {_recipe(job, call)}; or in the script: "
            'int(os.environ["LOCAL_RANK"])',
            "error",
        )


def _required(script: Script) -> Iterator[ast.Call]:
    for call in _options(script):
        if is_true(script.argument(call, "required")) and {_OLD, _NEW} & set(_names(call)):
            yield call


def must_be_passed(script: Script) -> ast.Call | None:
    """Return the option for the local rank if it is required, or if the script gets the local rank in no other way.
    With its default each rank trains alone, all ranks of a node use one GPU, or set_device(None) raises an error."""
    return next(_required(script), None) or _option_that_alone_says_it(script)


def _one_spelling(call: ast.Call, recipe: str, severity: Severity | None = None) -> Found:
    return at(
        call,
        f'{name_of(call.func)}("{_OLD}"): since torch 2.0 torch.distributed.launch passes --local-rank, which is '
        f'refused; declare both: "{_NEW}", "{_OLD}"; or with the script unchanged: {recipe}',
        severity,
    )


def _options(script: Script) -> Iterator[ast.Call]:
    """Yield calls of add_argument(…) and click's option(…), except conditional ones for other versions of torch."""
    calls = [*script.methods_called("add_argument"), *script.calls_to("click.option", "typer.Option")]
    yield from (c for c in calls if all(is_main_guard(test) for test in script.enclosing_tests(c)))


def _names(call: ast.Call) -> list[str]:
    return [text for a in call.args if (text := text_in(a))]


def _has_only_the_old_name(call: ast.Call) -> bool:
    return _OLD in _names(call) and "--local-rank" not in _names(call)


def _reads_local_rank(script: Script) -> bool:
    return any(script.variable_read(n) == "LOCAL_RANK" for n in script.nodes)


def _knows_all_options(script: Script, call: ast.Call) -> bool:
    """True if parse_args() uses a parser whose options are all in this file."""
    if call.args or call.keywords or not isinstance(call.func, ast.Attribute):
        return False
    parsers = script.origins(call.func.value)
    made_here = all(isinstance(p, ast.Call) and script.called(p) == "argparse.ArgumentParser" for p in parsers)
    inherits = any(isinstance(p, ast.Call) and script.argument(p, "parents") for p in parsers)
    name = name_of(call.func.value)
    given_away = any(
        name and name == name_of(a) for c in script.calls for a in (*c.args, *(k.value for k in c.keywords))
    )
    takes_the_rest = any(script.argument(c, "nargs") for c in _options(script))
    return made_here and not (inherits or given_away or takes_the_rest)


# ---------------------------------------------------------------- scripts that train alone without the option


@rule(
    "error",
    wrong='command: [torchrun, train.py]    # add_argument("--local_rank", default=-1), and -1 is a single process',
    right='command: [torchrun, --no-python, sh, -c, "exec python train.py --local_rank=$LOCAL_RANK"]',
)
def local_rank_not_passed(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torchrun and ddprun set LOCAL_RANK and do not pass --local_rank. An older script that treats the default, -1 or
    None, as a single process then forms no group: each rank trains its own model, and the job succeeds. If the option
    selects the GPU, the defaults 0 and -1 put all ranks of a node on the first, which NCCL refuses (Duplicate GPU
    detected), and torch.cuda.set_device(None) raises an error."""
    # Without a launcher one process may use all GPUs of its node, so this is a mistake only with several nodes.
    starts_ranks = job.by_torchrun or job.launcher == "ddprun" or (job.launcher == "python" and (job.nodes or 1) > 1)
    if not starts_ranks or job.has_one_rank or _is_given(job):
        return
    option = _option_that_alone_says_it(script)
    if option is None or (_NEW in _names(option) and _launch_passes_it(job)):
        return
    default = literal(script.argument(option, "default"))
    severity: Severity = "error"
    hides_others = any(name == "CUDA_VISIBLE_DEVICES" for name, _, _ in script.variables_set)
    if default_means_alone(script):
        so = "the script forms no group, so each rank trains alone and the job succeeds"
    elif job.gpus == 0 or not _sets_its_device(script):
        return
    elif default in (0, -1) and (job.nproc or 1) > 1 and not hides_others:  # set_device(-1) does nothing
        so = f"all {job.nproc} ranks of a node use its first GPU"
        severity = "error" if backends(script, job) == {"nccl"} else "warning"
    elif default is None:
        so = "set_device(None) raises an error"
    else:
        return
    yield at(
        option,
        f"{script.text_of(option)}: {job.launcher} does not pass it, and with its default {so}. Two "
        f"fixes: with the script unchanged: {_recipe(job, option)}; or in the script: "
        'int(os.environ["LOCAL_RANK"])',
        severity,
    )


def default_means_alone(script: Script) -> ast.Call | None:
    """Return the option for the local rank if the script, without it, certainly forms no group but still trains."""
    option = _option_that_alone_says_it(script)
    default = None if option is None else literal(script.argument(option, "default"))
    if default not in (None, -1):
        return None
    alone = Paths(script, lambda node: default if _is_local_rank(script, node) else UNKNOWN)
    return None if any(alone.reaches(call) for call in script.calls_to(INIT)) else option


def _sets_its_device(script: Script) -> bool:
    """True if the script certainly uses the option's value as its GPU."""
    calls = script.calls_to("torch.cuda.set_device")
    chosen = [script.argument(call, "device", 0) for call in calls]
    is_its_own = [device is not None and _is_local_rank(script, device) for device in chosen]
    return bool(is_its_own) and all(is_its_own)


def _option_that_alone_says_it(script: Script) -> ast.Call | None:
    """Return the option for the local rank, if no other source gives this rank and the script forms the group."""
    options = [call for call in _options(script) if {_OLD, _NEW} & set(_names(call))]
    # The option may be declared twice, once for each spelling.
    if (
        not (len(options) == 1 or (len(options) == 2 and {_OLD, _NEW} == {n for o in options for n in _names(o)}))
        or not script.calls_to(INIT)
        or script.starts
        or script.frameworks - _TRAIN_BY_HAND
    ):
        return None
    return None if is_true(script.argument(options[0], "required")) or _is_set(script) else options[0]


def _is_local_rank(script: Script, node: ast.expr) -> bool:
    return all(isinstance(o, ast.expr) and name_of(o) == "local_rank" for o in script.origins(node))


# Scripts that take only the model from these frameworks may still form the group themselves.
_TRAIN_BY_HAND = {"transformers"}


def _is_given(job: CheckedJob) -> bool:
    return any(word.startswith((_OLD, _NEW)) for word in job.words)


def _launch_passes_it(job: CheckedJob) -> bool:
    return (job.launcher.startswith(_LAUNCH) or job.launcher == "launch.py") and "use_env" not in job.launcher_options


def _is_set(script: Script) -> bool:
    """True if the script may get its local rank from another source: the environment, or a function."""
    named = [node for node in script.nodes if text_in(node) in ("LOCAL_RANK", "local_rank")]
    if any(getattr(script.parent(node), "arg", "") not in ("dest", "help") for node in named):
        return True
    given = [(k, k.value) for c in script.calls for k in c.keywords if k.arg == "local_rank"]
    bound = [(t, value) for n in script.nodes for target, value in bindings_in(n) for t in ast.walk(target)
             if name_of(t) == "local_rank"]  # fmt: skip
    return any(not isinstance(value, ast.AST) or name_of(value) != "local_rank" for _, value in (*given, *bound))
