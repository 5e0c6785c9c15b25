"""Rules about ranks and their GPUs, and functions that find conditions on ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddpjob_check.nodes import Function, before, has_hidden_arguments, means_one_process, name_of, text_in
from ddpjob_check.reached import is_otherwise
from ddpjob_check.rule import CheckedJob, Found, Severity, rule
from ddpjob_check.script import DDP, INIT, Kind, Script

# Every rank of the group must call these, otherwise the callers wait. isend, send and recv need only two ranks.
COLLECTIVES = {
    f"torch.distributed.{name}"
    for name in (
        "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
        "broadcast_object_list gather gather_object monitored_barrier reduce reduce_scatter reduce_scatter_tensor "
        "scatter scatter_object_list"
    ).split()
}
_GROUP_POSITION = {"barrier": 0, "monitored_barrier": 0, "broadcast": 2, "all_reduce": 2}


def at(node: ast.AST, message: str, severity: Severity | None = None) -> Found:
    """Return a finding at a node of the script. severity: if it differs from the rule's own."""
    return Found(getattr(node, "lineno", 1), message, severity, getattr(node, "col_offset", 0) + 1, node)


@rule(
    "error",
    wrong='dist.init_process_group("nccl", rank=local_rank, world_size=world_size)',
    right='dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=world_size)',
)
def rank_is_local_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """The local rank starts from 0 on every node, so several processes claim rank 0: the group never forms, or forms
    once per node."""
    several = job.several_nodes(script)
    for call in script.inits if several else ():
        rank = script.argument(call, "rank", 4 if script.called(call) == INIT else None)
        kinds = script.kinds(rank)
        # A script that starts processes itself may be for one node only, unless the job has several nodes.
        certain = kinds == {Kind.LOCAL} or (kinds <= {Kind.LOCAL, Kind.INDEX} and job.nodes)
        if several and rank and certain and not is_otherwise(script, call):
            severity, where = several
            right = (
                'int(os.environ["RANK"])'
                if kinds == {Kind.LOCAL}
                else 'int(os.environ["NODE_RANK"]) * nproc + the number of the process on its node'
            )
            count = "two" if job.nodes == 2 else "several"
            message = f"{short_name(script, call)}(rank={script.text_of(rank)}): {where} {count} processes get rank 0"
            yield at(rank, f"{message}; use {right}", severity)


@rule(
    "error",
    wrong='rank = int(os.environ["RANK"])\nmodel = DDP(model.to(rank), device_ids=[rank])',
    right='local_rank = int(os.environ["LOCAL_RANK"])\nmodel = DDP(model.to(local_rank), device_ids=[local_rank])',
)
def device_is_global_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """GPUs are numbered from 0 on each node: rank 8 of a job with 8 GPUs per node belongs on GPU 0 of the second."""
    several = job.several_nodes(script)
    if several is None:
        return
    severity, where = several
    if job.gpus is None or (job.world_size or 0) <= job.gpus:
        severity = "warning"  # a GPU with that number may exist
    for call, device in _devices(script):
        if script.kinds(device) == {Kind.GLOBAL}:
            yield at(
                device,
                f"{script.text_of(call.func)}(…): {script.text_of(device)} is the rank in the whole job, and {where} "
                'it exceeds the GPUs of a node; use int(os.environ["LOCAL_RANK"])',
                severity,
            )


def _devices(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, expression) for each expression that is used as the index of a GPU."""
    for call in script.calls_to(DDP):
        listed = script.argument(call, "device_ids", 1)
        if isinstance(listed, ast.List | ast.Tuple):
            yield from ((call, element) for element in listed.elts)
    for call in script.calls_to("torch.cuda.set_device"):
        if call.args:
            yield call, _index(call.args[0])
    for call in script.calls_to("torch.device"):
        if len(call.args) == 2:
            yield call, call.args[1]
        elif len(call.args) == 1:
            yield from ((call, index) for index in [_index(call.args[0])] if index is not call.args[0])
    for call in [*script.methods_called("to"), *script.methods_called("cuda")]:
        if call.args and script.full_name(call.func) not in ("torch.cuda", "torch.to"):
            yield call, _index(call.args[0])


def _index(device: ast.expr) -> ast.expr:
    """Return the index in f"cuda:{rank}", "cuda:%d" % rank or "cuda:{}".format(rank), else the expression itself."""
    if isinstance(device, ast.JoinedStr) and len(device.values) == 2:
        value = device.values[1]
        return value.value if isinstance(value, ast.FormattedValue) and _is_cuda(device.values[0]) else device
    if isinstance(device, ast.BinOp) and isinstance(device.op, ast.Mod | ast.Add) and _is_cuda(device.left):
        return device.right
    if isinstance(device, ast.Call) and isinstance(device.func, ast.Attribute) and device.func.attr == "format":
        return device.args[0] if len(device.args) == 1 and _is_cuda(device.func.value) else device
    return device


def _is_cuda(node: ast.AST) -> bool:
    return text_in(node).startswith("cuda:")


@rule("warning", wrong="model.cuda()", right='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\nmodel.cuda()')
def set_device_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Without a current device, `.cuda()` of every process on a node means GPU 0: nccl refuses two ranks on one GPU, or
    its memory runs out."""
    if not script.calls_to(INIT) or script.uses_a_framework or job.nproc == 1 or job.gpus == 0:
        return
    if script.mentions("set_device", "set_device_index", "set_default_device", "device_id", "device_index"):
        return
    if any(name == "CUDA_VISIBLE_DEVICES" for name, _, _ in script.variables_set) or script.calls_to(
        "torch.cuda.device"
    ):
        return
    for call in script.calls:
        if _is_bare_cuda(script, call) and script.on_every_rank(call):
            yield at(
                call,
                f"{script.text_of(call)}: without torch.cuda.set_device(local_rank) this is GPU 0 for all processes of "
                "a node; call set_device before the first use of a GPU",
            )
            return


def _is_bare_cuda(script: Script, call: ast.Call) -> bool:
    func = call.func
    if script.full_name(func) == "torch.device":
        return len(call.args) == 1 and not call.keywords and script.texts(call.args[0]) == ["cuda"]
    if not isinstance(func, ast.Attribute) or script.full_name(func).startswith("torch."):
        return False
    if func.attr == "cuda":
        return not call.args and all(k.arg == "non_blocking" for k in call.keywords)
    return func.attr == "to" and bool(call.args) and script.texts(call.args[0]) == ["cuda"]


def has_group(script: Script, call: ast.Call) -> bool:
    """True if the call may be for a subgroup, so that not all ranks need to call it."""
    group = script.argument(call, "group", _GROUP_POSITION.get(short_name(script, call), 3))
    return group is not None or has_hidden_arguments(call)


@dataclass(frozen=True)
class Guard:
    """A condition that lets only some ranks reach a line."""

    test: ast.expr
    holds: bool
    """True if ranks reach the line when the condition holds."""
    ours: Sequence[ast.AST] = ()
    """The branch of these ranks; empty if the other ranks have left the function earlier."""
    others: Sequence[ast.AST] = ()
    """The branch of the other ranks."""
    is_certain: bool = True
    """False if perhaps all ranks reach the line, as after `if rank == 0 and not found: return`."""

    def to_text(self, script: Script) -> str:
        """Return the condition as a clause for a message, such as "only if `rank == 0`"."""
        return f"only if {'' if self.holds else 'not '}`{script.text_of(self.test)}`"


def guard(script: Script, call: ast.Call) -> Guard | None:
    """Return the innermost guard of a call. Branches that raise or exit are no guards, because they end the job."""
    for child, parent in script.above(call):
        for possible in (
            *_around(parent, child), *_returned_before(parent, child), *_by_decorator(script, parent, child)
        ):  # fmt: skip
            if is_for_some(script, possible.test, holds=possible.holds):
                return possible
            test = possible.test
            may_be = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not possible.holds
            if may_be and is_for_some(script, test):
                return replace(possible, is_certain=False)
    return None


def _around(parent: ast.AST, child: ast.AST) -> Iterator[Guard]:
    if isinstance(parent, ast.If) and child is not parent.test:
        holds = child in parent.body
        yield Guard(parent.test, holds, *((parent.body, parent.orelse) if holds else (parent.orelse, parent.body)))
    elif isinstance(parent, ast.IfExp) and child is not parent.test:
        holds = child is parent.body
        yield Guard(parent.test, holds, [child], [parent.orelse if holds else parent.body])
    elif isinstance(parent, ast.BoolOp) and child in parent.values:
        holds = isinstance(parent.op, ast.And)
        yield from (Guard(value, holds, [child]) for value in parent.values[: parent.values.index(child)])
    elif isinstance(parent, ast.Match) and isinstance(child, ast.match_case):
        cases = parent.cases[: parent.cases.index(child)]
        others = [statement for case in parent.cases if case is not child for statement in case.body]
        tests = ((_of_case(parent, case), case is child) for case in (*cases, child))
        yield from (Guard(test, holds, child.body, others) for test, holds in tests if test is not None)
    elif isinstance(parent, Function) and child in parent.body:
        runs = (d for d in parent.decorator_list if name_of(d) in _RUNS_ON_ONE)
        yield from (Guard(decorator, True, parent.body, is_certain=False) for decorator in runs)


_RUNS_ON_ONE = ("rank_zero_only", "rank0_only", "main_process_only", "master_only", "on_main_process")


def _of_case(match: ast.Match, case: ast.match_case) -> ast.expr | None:
    """Return the comparison that a case stands for: `rank == 0` for `case 0:`."""
    if not isinstance(case.pattern, ast.MatchValue) or case.guard is not None:
        return None
    test = ast.Compare(match.subject, [ast.Eq()], [case.pattern.value])
    return ast.copy_location(test, match.subject)


def _by_decorator(script: Script, parent: ast.AST, child: ast.AST) -> Iterator[Guard]:
    """Yield the condition (such as `rank == 0`) under which a decorator of the script calls the decorated function."""
    for decorator in parent.decorator_list if isinstance(parent, Function) and child in parent.body else ():
        wrapper = script.definition(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if isinstance(decorator, ast.Call) and isinstance(wrapper, Function):
            wrapper = next((s for s in wrapper.body if isinstance(s, Function)), None)
        if not isinstance(wrapper, Function) or wrapper is parent or not wrapper.args.args:
            continue
        decorated = wrapper.args.args[0].arg
        calls = [n for n in ast.walk(wrapper) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == decorated]
        guards = [guard(script, call) for call in calls]
        yield from (replace(found, is_certain=False) for found in guards[:1] if found and None not in guards)


def _returned_before(parent: ast.AST, child: ast.AST) -> Iterator[Guard]:
    for sibling in (s for s in before(parent, child) if isinstance(s, ast.If)):
        for branch, holds in ((sibling.body, False), (sibling.orelse, True)):
            if branch and isinstance(branch[-1], ast.Return | ast.Continue | ast.Break):
                yield Guard(sibling.test, holds, (), branch)


def is_for_some(script: Script, test: ast.expr, *, holds: bool = True) -> bool:
    """True for a condition that is true only on some ranks: rank == 0, rank != 0, not rank, is_main. With `or` it may
    be true on all. holds=False: True if the condition is false only on some ranks."""
    if isinstance(test, ast.BoolOp):
        splits = [is_for_some(script, value, holds=holds) for value in test.values]
        if isinstance(test.op, ast.And) == holds:
            return any(splits)
        of_group = [s or _is_false_in_a_group(v, holds) for s, v in zip(splits, test.values, strict=True)]
        return any(splits) and all(of_group)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_rank(script, test.operand) or is_for_some(script, test.operand, holds=not holds)
    if isinstance(test, ast.Compare):
        return is_rank(script, test.left) and _splits_the_ranks(test)
    name = script.called(test) or script.full_name(test)
    return name.rsplit(".", 1)[-1] in (*_RUNS_ON_ONE, "is_main", "is_master", "is_main_process", "is_master_process")


def _is_false_in_a_group(test: ast.expr, holds: bool) -> bool:
    """True for a condition that is false if there is a group: `not distributed`, `local_rank == -1`."""
    alone = isinstance(test, ast.Compare) and len(test.ops) == 1 and ast.unparse(test.comparators[0]) == "-1"
    if alone and isinstance(test, ast.Compare) and name_of(test.left).endswith("rank"):
        return isinstance(test.ops[0], ast.Eq if holds else ast.NotEq)
    return means_one_process(test, holds=holds)


def _splits_the_ranks(test: ast.Compare) -> bool:
    """True for `rank == 0`. False for `rank >= 0`, which is true on all ranks, and for `local_rank != -1`, which means
    that there is a group."""
    operator, other = test.ops[0], test.comparators[0]
    if len(test.ops) != 1:
        return False
    if isinstance(operator, ast.In | ast.NotIn):  # local_rank in (-1, 0)
        return isinstance(other, ast.Tuple | ast.List | ast.Set) and ast.unparse(other).strip("()[]{}, ") in _FIRST
    number = other.value if isinstance(other, ast.Constant) else None
    if isinstance(number, str):  # os.environ["RANK"] == "0"
        return number.isdecimal() and isinstance(operator, ast.Eq | ast.NotEq)
    if not isinstance(number, int):
        return False
    return isinstance(operator, ast.Eq | ast.NotEq | ast.Gt | ast.LtE) or (
        isinstance(operator, ast.Lt | ast.GtE) and number > 0
    )


_FIRST = ("0", "-1, 0", "0, -1")


def is_rank(script: Script, node: ast.expr) -> bool:
    """True if an expression is certainly a rank, or is named like one."""
    kinds = script.kinds(node)
    if Kind.UNKNOWN not in kinds:
        return True
    return name_of(node) in ("rank", "local_rank", "global_rank", "world_rank")


def is_local(script: Script, test: ast.expr) -> bool:
    """True if a condition tests the local rank, which is 0 everywhere with one process per node."""
    numbers = [n for n in ast.walk(test) if isinstance(n, ast.expr) and is_rank(script, n)]
    return all(name_of(n) == "local_rank" or script.kinds(n) == {Kind.LOCAL} for n in numbers) and bool(numbers)


def short_name(script: Script, call: ast.Call) -> str:
    """Return the last part of a call's name: all_reduce for torch.distributed.all_reduce."""
    return script.called(call).removeprefix("torch.distributed.")
