"""Rules about gradients that a script averages itself, parameter by parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import Function, before, is_method, leaves, name_of, text_in, words_in
from ddpjob_check.ranks import COLLECTIVES, at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Script

# Functions that a script may call on a group without averaging gradients.
_NO_AVERAGE = {
    f"torch.distributed.{name}"
    for name in (
        "init_process_group destroy_process_group get_rank get_world_size get_backend get_node_local_rank barrier "
        "monitored_barrier is_initialized is_available is_nccl_available is_gloo_available is_torchelastic_launched "
        "gather_object all_gather_object broadcast_object_list"
    ).split()
}
_MEASURES = set(
    "acc accuracy correct count counts loss losses metric metrics n num perplexity ppl running seen total".split()
)


@rule(
    "error",
    wrong="for param in model.parameters():\n    if type(param) is torch.Tensor:\n        dist.all_reduce(param.grad)",
    right="for param in model.parameters():\n    dist.all_reduce(param.grad)",
)
def gradients_not_averaged(script: Script, job: CheckedJob) -> Iterator[Found]:
    """model.parameters() yields torch.nn.Parameter, so `type(param) is torch.Tensor` is never true: no gradient is
    averaged, every rank trains a model of its own, and no error is raised."""
    if job.has_one_rank or not any(script.called(c) in COLLECTIVES for c in script.calls):
        return
    for node in script.nodes:
        if isinstance(node, ast.If) and _averages_nothing(script, node):
            yield at(node.test, _message(script, node.test))
        elif isinstance(node, ast.comprehension):
            yield from (at(test, _message(script, test)) for test in node.ifs if _is(script, test, always=False))


def _message(script: Script, test: ast.expr) -> str:
    return (
        f"{script.text_of(test)}: parameters() yields torch.nn.Parameter, so this test has the same result for all "
        "of them, and no gradient is averaged; remove the test, or use isinstance(…, torch.Tensor)"
    )


def _averages_nothing(script: Script, node: ast.If) -> bool:
    if _is(script, node.test, always=False):
        return _has_collective(script, node.body) and not _has_collective(script, node.orelse)
    if not (_is(script, node.test, always=True) and leaves(node.body)):
        return False
    block = getattr(script.parent(node), "body", [])
    return node in block and _has_collective(script, block[block.index(node) + 1 :])


def _has_collective(script: Script, body: list[ast.stmt]) -> bool:
    calls = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Call)]
    return any(script.called(c) in COLLECTIVES or isinstance(script.definition(c.func), Function) for c in calls)


def _is(script: Script, test: ast.expr, *, always: bool) -> bool:
    """True if a test of a parameter is certainly true for all parameters or, with always=False, certainly false."""
    if isinstance(test, ast.BoolOp):
        decides = isinstance(test.op, ast.Or if always else ast.And)
        return decides and any(_is(script, value, always=always) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is(script, test.operand, always=not always)
    return _compares_type(script, test, ast.IsNot | ast.NotEq | ast.NotIn if always else ast.Is | ast.Eq | ast.In)


def _compares_type(script: Script, test: ast.expr, operators: object) -> bool:
    """True if the type of a parameter is compared, by one of these operators, with types that no parameter has."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], operators):  # type: ignore[arg-type]
        return False
    for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        typed = _typed(script, one)
        if typed is not None and _is_parameter(script, typed):
            kinds = other.elts if isinstance(other, ast.Tuple | ast.List | ast.Set) else [other]
            return all(_is_other_type(script, k) for k in kinds)
    return False


def _typed(script: Script, node: ast.expr) -> ast.Name | None:
    """Return the name p for type(p), p.__class__ and type(p).__name__; else None."""
    value = next(iter(script.origins(node)), None)
    if isinstance(value, ast.Attribute) and value.attr in ("__name__", "__qualname__"):
        value = value.value
    if isinstance(value, ast.Call) and name_of(value.func) == "type" and len(value.args) == 1:
        value = value.args[0]
    elif isinstance(value, ast.Attribute) and value.attr == "__class__":
        value = value.value
    else:
        return None
    return value if isinstance(value, ast.Name) else None


def _is_other_type(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in ("Tensor", "Variable", "FloatTensor")
    name = script.full_name(node)
    return name.startswith("torch.") and name.endswith(("Tensor", "Variable"))


def _is_parameter(script: Script, name: ast.Name) -> bool:
    """True if a name is the variable of a loop over parameters()."""
    child: ast.AST = name
    while (parent := script.parent(child)) is not None and not isinstance(parent, Function):
        generators = getattr(parent, "generators", [])
        loops = [parent] if isinstance(parent, ast.For | ast.comprehension) else generators
        if any(_binds(loop.target, name.id) and _gives_parameters(script, loop.iter) for loop in loops):
            return True
        child = parent
    return False


def _binds(target: ast.expr, name: str) -> bool:
    """True if the loop's target is this name, or ends with this name, as in `name, param`."""
    last = target.elts[-1] if isinstance(target, ast.Tuple | ast.List) and target.elts else target
    return name_of(last) == name


def _gives_parameters(script: Script, iterated: ast.expr, depth: int = 0) -> bool:
    origin = next(iter(script.origins(iterated)), None)
    if isinstance(origin, ast.Subscript):
        return text_in(origin.slice) == "params"
    name = name_of(origin.func) if isinstance(origin, ast.Call) else ""
    if isinstance(origin, ast.Call) and name in ("list", "enumerate", "filter", "reversed", "sorted", "tuple"):
        given = origin.args[name == "filter" :][:1]
        return depth < 6 and bool(given) and _gives_parameters(script, given[0], depth + 1)
    return name in ("parameters", "named_parameters")


# ---------------------------------------------------------------- accumulation


@rule(
    "error",
    wrong="for i, x in enumerate(loader):\n    with model.no_sync():\n        model(x).sum().backward()",
    right="for i, x in enumerate(loader):\n    with model.no_sync() if i % 4 != 3 else nullcontext():\n"
    "        model(x).sum().backward()",
)
def no_sync_always(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Within no_sync(), or with require_backward_grad_sync = False, backward() only adds up gradients, and the next
    backward() outside of it averages them. Without one, each rank trains a model of its own, and no error is raised."""
    if job.has_one_rank or script.uses_a_framework:
        return
    yield from _switched_off(script)
    if not script.mentions("no_sync"):
        return
    if not script.methods_called("step") or not script.calls_to(DDP) or _averages_otherwise(script):
        return
    backwards = script.methods_called("backward")
    contexts = [_no_sync(script, call) for call in backwards]
    first = contexts[0] if contexts else None
    # DDP decides in the forward pass if it averages gradients, so the model must be called within no_sync() too.
    forwards = [c for c in script.calls if isinstance(c.func, ast.Name | ast.Attribute) and script.is_wrapped(c.func)]
    is_inside = any(_no_sync(script, c) is not None for c in forwards)
    if first is not None and None not in contexts and is_inside:
        yield at(
            first,
            f"with {script.text_of(first)}: every backward() of this script is inside, so no gradient is averaged; "
            "leave no_sync() for the backward() before optimizer.step()",
        )


def _averages_otherwise(script: Script) -> bool:
    """True if the script may average gradients or parameters itself, or may set require_backward_grad_sync directly."""
    if script.mentions(_SWITCH, "PeriodicModelAverager", "PostLocalSGDOptimizer", "average_parameters"):
        return True
    contexts = [n for n in script.nodes if isinstance(n, ast.Attribute) and n.attr == "no_sync"]
    known = {_context(script, n.context_expr) if isinstance(n, ast.withitem) else _entered(n) for n in script.nodes}
    return len(contexts) != len(known - {None}) or any(exchanges(script, call) for call in script.calls)


_SWITCH = "require_backward_grad_sync"


def _switched_off(script: Script) -> Iterator[Found]:
    """Yield a finding for `model.require_backward_grad_sync = False` if it is still False when training starts."""
    uses = [n for n in script.nodes if isinstance(n, ast.Attribute) and n.attr == _SWITCH]
    sets = [n for n in script.nodes if isinstance(n, ast.Assign) and any(t in uses for t in n.targets)]
    backwards = script.methods_called("backward")
    if len(sets) != len(uses) or not sets or not backwards or script.mentions("no_sync", "setattr"):
        return
    first, inside = sets[0], [c for c in backwards if script.function(c) is script.function(sets[0])]
    is_before = all(first.lineno < c.lineno for c in inside)
    always = all(isinstance(n.value, ast.Constant) and n.value.value is False for n in sets)
    wrapped = script.is_wrapped(uses[0].value) and not any(exchanges(script, call) for call in script.calls)
    if is_before and always and wrapped and not any(script.enclosing_tests(first)):
        yield at(
            first,
            f"{script.text_of(first)}: nothing sets it to True again, so no gradient is averaged; set it to True "
            "before the forward pass whose backward() comes before optimizer.step()",
            "error" if inside == backwards else "warning",
        )


def _context(script: Script, entered: ast.expr) -> ast.expr | None:
    """Return model.no_sync() if an expression certainly is this call, or a name for its result; else None."""
    only = origins[0] if len(origins := script.origins(entered)) == 1 else None
    return only if isinstance(only, ast.Call) and is_method(only, "no_sync") else None


def _no_sync(script: Script, call: ast.Call, seen: frozenset[Function] = frozenset()) -> ast.expr | None:
    """Return the no_sync() that certainly encloses a call, or all calls of its function; else None."""
    for child, parent in script.above(call):
        entered = [entered for statement in before(parent, child) if (entered := _entered(statement)) is not None]
        if isinstance(parent, ast.With):
            entered += [c for item in parent.items if (c := _context(script, item.context_expr)) is not None]
        if entered:
            return entered[0]
    function = script.function(call)
    callers = [] if function is None or function in seen else script.callers(function)
    found = [_no_sync(script, c.call, seen | {function}) for c in callers if function]
    return found[0] if found and None not in found else None


def _entered(statement: ast.AST) -> ast.expr | None:
    """Return the argument of `stack.enter_context(model.no_sync())`; None for any other statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    is_entered = isinstance(call, ast.Call) and is_method(call, "enter_context") and len(call.args) == 1
    return call.args[0] if isinstance(call, ast.Call) and is_entered and is_method(call.args[0], "no_sync") else None


def exchanges(script: Script, call: ast.Call) -> bool:
    """True if a call may exchange gradients or parameters between ranks, not only a metric such as the loss."""
    name = script.called(call)
    if not name.startswith("torch.distributed.") or name in _NO_AVERAGE:
        return False
    words = words_in(call.args[0]) if call.args else set()
    return name not in COLLECTIVES or words.isdisjoint(_MEASURES) or bool(words & {"grad", "param", "params"})
