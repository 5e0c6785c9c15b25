"""The rule about collectives that only some ranks call, directly or in a function of the file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ddpjob_check.nodes import Function, before, leaves, means_one_process, name_of, parameters_of, unmoved, words_of
from ddpjob_check.ranks import COLLECTIVES, Guard, at, guard, has_group, is_local, short_name
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Script

_NEW_GROUP = "torch.distributed.new_group"
# Decorators that do not change what a function does.
_TRANSPARENT = {"no_grad", "inference_mode", "enable_grad", "autocast", "compile", "record", "staticmethod", "property"}
_HAS_BUFFERS = ("register_buffer", "Buffer", "running_mean", "running_var")


@rule(
    "error",
    wrong="if rank == 0:\n    dist.all_reduce(loss)\n    print(loss)",
    right="dist.all_reduce(loss)\nif rank == 0:\n    print(loss)",
)
def collective_on_one_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A collective ends when all ranks have called it. If only some call it, or a function of the file that calls it,
    they wait until the timeout. A forward pass through DDP can do the same, because it
    broadcasts the buffers of the model."""
    if job.has_one_rank or not script.uses_torch:
        return
    for call in script.calls:
        guarding = guard(script, call) if _is_worth_a_look(script, call) else None
        if guarding is None or (job.nproc == 1 and is_local(script, guarding.test)):
            continue
        # The collective that every execution of this call runs, directly or in a function of the file.
        waits = _itself(script, call) or collective_in(script, script.functions_called(call))
        if waits is not None and not _others_join(script, call, guarding, waits):
            certain = guarding.is_certain and (job.nproc is not None or not is_local(script, guarding.test))
            yield at(call, _message(script, call, guarding, waits), "error" if certain else "warning")
        elif waits is None and (model := _forward(script, call)) and not _others_run(script, call, guarding):
            yield at(call, _of_forward(script, call, guarding, model), "warning")


def _is_worth_a_look(script: Script, call: ast.Call) -> bool:
    """True for calls that may wait for other ranks: a collective, a function of the file, or a model."""
    is_model = name_of(call.func).lower().endswith(("model", "net", "ddp"))
    return is_model or bool(_itself(script, call) or script.functions_called(call))


def _message(script: Script, call: ast.Call, guarding: Guard, waits: ast.Call) -> str:
    name = short_name(script, waits)
    here = f"{name}()" if waits is call else f"{script.text_of(call.func)}() calls {name}() (line {waits.lineno})"
    return (
        f"{here} {guarding.to_text(script)}: the other ranks never call it, so these wait until the timeout; "
        "call it on all ranks"
    )


def _of_forward(script: Script, call: ast.Call, guarding: Guard, model: str) -> str:
    return (
        f"{script.text_of(call.func)}(…) {guarding.to_text(script)} runs {model} through DDP, which broadcasts the "
        f"model's buffers to ranks that do not take part; call {model}.module, or run it on all ranks"
    )


# ---------------------------------------------------------------- what a call waits for


def _waits(script: Script, call: ast.Call) -> bool:
    """True for a call that returns only after all ranks have made it."""
    name = script.called(call)
    if name == DDP:
        return script.argument(call, "process_group") is None
    if name == _NEW_GROUP:
        return script.argument(call, "use_local_synchronization") is None
    return name in COLLECTIVES and not has_group(script, call)


def _itself(script: Script, call: ast.Call) -> ast.Call | None:
    """Return the collective that a call runs: the call itself, or the body of the called lambda; else None."""
    if _waits(script, call):
        return call
    only = origins[0] if len(origins := script.origins(call.func)) == 1 else None
    body = only.body if isinstance(only, ast.Lambda) else None
    return body if isinstance(body, ast.Call) and _waits(script, body) else None


def collective_in(
    script: Script, functions: list[Function], seen: frozenset[Function] = frozenset()
) -> ast.Call | None:
    """Return the first collective that all ranks certainly call in this function; None if that is uncertain."""
    function = functions[0] if len(functions) == 1 else None
    if function is None or function in seen or _is_changed(script, function):
        return None
    for call in script.calls_in(function):
        inner = call if _waits(script, call) else None
        if inner is None and (called := script.functions_called(call)) and len(seen) < _CALLS_MAX:
            inner = collective_in(script, called, seen | {function})
        if inner is not None and not _may_be_left_out(script, call) and guard(script, call) is None:
            return inner
    return None


_CALLS_MAX = 5
_CONDITIONS = (ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.match_case, ast.Lambda)


def _is_changed(script: Script, function: Function) -> bool:
    """True if calling the function may not run its body: a generator, or an unknown decorator."""
    names = {name_of(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}
    own = (n for n in ast.walk(function) if isinstance(n, ast.Yield | ast.YieldFrom))
    return not names <= _TRANSPARENT or any(script.function(n) is function for n in own)


def _may_be_left_out(script: Script, call: ast.Call) -> bool:
    """True if a condition in the function around a call may skip the call. "If a group exists" does not count."""
    for child, parent in script.above(call):
        if isinstance(parent, ast.If) and child is not parent.test:
            if not _means_alone(script, parent.test, holds=child not in parent.body):
                return True
        elif isinstance(parent, _CONDITIONS) or (isinstance(parent, ast.Try) and parent.handlers):
            return True
        if any(_leaves(script, statement) for statement in before(parent, child)):
            return True
    return False


def _means_alone(script: Script, test: ast.expr, *, holds: bool) -> bool:
    """True if a condition means a single process. A parameter proves nothing: a caller may pass evaluate(ddp=False)."""
    function = script.function(test)
    given = parameters_of(function) if function is not None else set()
    return means_one_process(test, holds=holds) and not any(
        isinstance(n, ast.Name) and n.id in given and not isinstance(script.parent(n), ast.Attribute)
        for n in ast.walk(test)
    )


def _leaves(script: Script, statement: ast.stmt) -> bool:
    """True if an earlier statement may leave the function, other than `if world_size == 1: return`."""
    if isinstance(statement, ast.If) and _means_alone(script, statement.test, holds=True):
        return False
    branches = [n for n in ast.walk(statement) if isinstance(n, ast.If) and leaves(n.body)]
    return any(not isinstance(n.body[-1], ast.Raise) for n in branches)


# ---------------------------------------------------------------- a forward pass on some ranks


def _forward(script: Script, call: ast.Call) -> str | None:
    """Return the DDP model that a call runs, as the caller names it, if DDP broadcasts its buffers; else None."""
    if _broadcasts(script, call.func):
        return script.text_of(call.func)
    for function in script.functions_called(call):
        for inner in script.calls_in(function):
            given = script.passed(call, function, name_of(inner.func)) if isinstance(inner.func, ast.Name) else None
            if _broadcasts(script, inner.func if given is None else given):
                return script.text_of(inner.func if given is None else given)
    return None


def _broadcasts(script: Script, model: ast.expr) -> bool:
    if not isinstance(model, ast.Name | ast.Attribute) or not script.is_wrapped(model):
        return False
    wraps = [o for o in script.origins(model) if isinstance(o, ast.Call) and script.called(o) == DDP]
    return all(script.argument(w, "broadcast_buffers") is None for w in wraps) and all(
        _may_have_buffers(script, script.argument(w, "module", 0)) for w in wraps
    )


def _may_have_buffers(script: Script, module: ast.expr | None) -> bool:
    """False for a model whose layers are all in this file and have no buffers: no BatchNorm, no register_buffer."""
    if script.mentions(*_HAS_BUFFERS) or any("Norm" in name for name in script.identifiers):
        return True
    return not all(_is_shown(script, origin) for origin in script.origins(module))


def _is_shown(script: Script, origin: object) -> bool:
    origin = unmoved(origin)
    if not isinstance(origin, ast.Call):
        return isinstance(origin, ast.Name) and all(
            _is_shown(script, o) for o in script.origins(origin) if o is not origin
        )
    own = script.definition(origin.func)
    if isinstance(own, ast.ClassDef):
        inside = [n for n in ast.walk(own) if isinstance(n, ast.Call) and name_of(n.func)[:1].isupper()]
        return all(script.called(n).startswith("torch.nn.") or script.definition(n.func) for n in inside)
    return script.called(origin).startswith("torch.nn.")


# ---------------------------------------------------------------- the other ranks


def _others_join(script: Script, call: ast.Call, guarding: Guard, waits: ast.Call) -> bool:
    """True if the other ranks may make the same call elsewhere: `if rank: barrier(); load(); if not rank: …`."""
    name = script.called(waits)
    if _has_counterpart(script, call, guarding, lambda other: _leads_to(script, other, name)):
        return True
    others = [c for statement in guarding.others for c in ast.walk(statement) if isinstance(c, ast.Call)]
    if not guarding.ours:  # the other ranks return early, and most code before a return only logs or cleans up
        others = [c for c in others if script.functions_called(c) or not words_of(name_of(c.func)).isdisjoint(_JOINS)]
    return any(_may_call(script, c, name) for c in others)


_JOINS = {"barrier", "broadcast", "gather", "join", "reduce", "sync", "synchronize", "wait"}


def _has_counterpart(script: Script, call: ast.Call, guarding: Guard, meets: Callable[[ast.Call], bool]) -> bool:
    return any(
        other is not call
        and not any(n is other for branch in guarding.ours for n in ast.walk(branch))
        and any(script.depends_on_rank(test) for test in script.enclosing_tests(other))
        and meets(other)
        for other in script.calls_in(script.function(call))
    )


def _others_run(script: Script, call: ast.Call, guarding: Guard) -> bool:
    """True if the other ranks call the same model or function elsewhere."""
    what = ast.dump(call.func)
    return _has_counterpart(script, call, guarding, lambda other: ast.dump(other.func) == what)


def _leads_to(script: Script, call: ast.Call, name: str) -> bool:
    if script.called(call) == name:
        return True
    return any(script.called(inner) == name for f in script.functions_called(call) for inner in script.calls_in(f))


def _may_call(script: Script, call: ast.Call, name: str) -> bool:
    """True if a call may run the collective `name`: directly, in a function of the file, or in an unknown function."""
    if script.called(call) == name:
        return True
    functions = script.functions_called(call)
    if functions:
        inner = [c for f in functions for c in script.calls_in(f)]
        return any(script.called(n) in (name, "") or script.functions_called(n) for n in inner)
    full = script.called(call)
    return not full.startswith(("torch.", "print", "os.", "time.", "logging.", "len", "range", "str", "int"))
