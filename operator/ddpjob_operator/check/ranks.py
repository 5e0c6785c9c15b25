"""Ranks, their GPUs, and the collectives that all ranks must call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_operator.check.nodes import Function, before, has_hidden_arguments, leaves, name_of
from ddpjob_operator.check.otherwise import is_otherwise
from ddpjob_operator.check.rule import Found, Job, Severity, rule
from ddpjob_operator.check.script import DDP, INIT, Kind, Script

# Every rank of the group must call these, otherwise those that do wait for ever. isend, send and recv are for two.
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
    """A finding at a node of the script. severity: where it differs from the rule's own."""
    return Found(getattr(node, "lineno", 1), message, severity, getattr(node, "col_offset", 0) + 1, node)


@rule(
    "error",
    wrong='dist.init_process_group("nccl", rank=local_rank, world_size=world_size)',
    right='dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=world_size)',
)
def rank_is_local_rank(script: Script, job: Job) -> Iterator[Found]:
    """The local rank starts from 0 on every node, so several processes claim rank 0: the group never forms, or forms
    once per node."""
    several = job.several_nodes(script)
    for call in script.inits if several else ():
        rank = script.argument(call, "rank", 4 if script.called(call) == INIT else None)
        kinds = script.kinds(rank)
        # A script that starts its processes itself may be meant for one node only, unless the job has several.
        certain = kinds == {Kind.LOCAL} or (kinds <= {Kind.LOCAL, Kind.INDEX} and job.nodes)
        if several and rank and certain and not is_otherwise(script, call):
            severity, where = several
            right = (
                'int(os.environ["RANK"])'
                if kinds == {Kind.LOCAL}
                else 'int(os.environ["NODE_RANK"]) * nproc + the number of the process on its node'
            )
            count = "two" if job.nodes == 2 else "several"
            message = f"{_short(script, call)}(rank={script.text_of(rank)}): {where} {count} processes get rank 0"
            yield at(rank, f"{message}; use {right}", severity)


@rule(
    "error",
    wrong='rank = int(os.environ["RANK"])\nmodel = DDP(model.to(rank), device_ids=[rank])',
    right='local_rank = int(os.environ["LOCAL_RANK"])\nmodel = DDP(model.to(local_rank), device_ids=[local_rank])',
)
def device_is_global_rank(script: Script, job: Job) -> Iterator[Found]:
    """GPUs are numbered from 0 on each node: rank 8 of a job with 8 GPUs per node belongs on GPU 0 of the second."""
    several = job.several_nodes(script)
    if several is None:
        return
    severity, where = several
    for call, device in _devices(script):
        if script.kinds(device) == {Kind.GLOBAL}:
            yield at(
                device,
                f"{script.text_of(call.func)}(…): {script.text_of(device)} is the rank in the whole job, and {where} "
                'it exceeds the GPUs of a node; use int(os.environ["LOCAL_RANK"])',
                severity,
            )


def _devices(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The numbers that are used as a GPU's index."""
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
    """The number in f"cuda:{rank}", "cuda:%d" % rank and "cuda:{}".format(rank), else the expression itself."""
    if isinstance(device, ast.JoinedStr) and len(device.values) == 2:
        value = device.values[1]
        return value.value if isinstance(value, ast.FormattedValue) and _is_cuda(device.values[0]) else device
    if isinstance(device, ast.BinOp) and isinstance(device.op, ast.Mod | ast.Add) and _is_cuda(device.left):
        return device.right
    if isinstance(device, ast.Call) and isinstance(device.func, ast.Attribute) and device.func.attr == "format":
        return device.args[0] if len(device.args) == 1 and _is_cuda(device.func.value) else device
    return device


def _is_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda:")


@rule("warning", wrong="model.cuda()", right='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\nmodel.cuda()')
def set_device_missing(script: Script, job: Job) -> Iterator[Found]:
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


@rule(
    "error",
    wrong="if rank == 0:\n    dist.all_reduce(loss)\n    print(loss)",
    right="dist.all_reduce(loss)\nif rank == 0:\n    print(loss)",
)
def collective_on_one_rank(script: Script, job: Job) -> Iterator[Found]:
    """A collective ends when all ranks have called it. If only some call it, they wait until the timeout."""
    for call in script.calls:
        name = script.called(call)
        if name not in COLLECTIVES or has_group(script, call):
            continue
        guarding = guard(script, call)
        if guarding is not None and not _others_join(script, call, guarding, name):
            yield at(
                call,
                f"{_short(script, call)}() only where `{script.text_of(guarding.test)}`: the other ranks never call "
                f"it, and these wait for them until the timeout; call it on all ranks",
            )


def has_group(script: Script, call: ast.Call) -> bool:
    """Whether a collective may be one of some ranks only."""
    group = script.argument(call, "group", _GROUP_POSITION.get(_short(script, call), 3))
    return group is not None or has_hidden_arguments(call)


def guard(script: Script, call: ast.Call) -> ast.If | None:
    """The `if` that lets some ranks pass to this call, and not all."""
    for child, parent in script.above(call):
        if isinstance(parent, ast.If) and child is not parent.test and is_for_some(script, parent.test):
            return parent
        for sibling in before(parent, child):
            if isinstance(sibling, ast.If) and leaves(sibling.body) and is_for_some(script, sibling.test):
                return sibling
    return None


def is_for_some(script: Script, test: ast.expr) -> bool:
    """rank == 0, rank != 0, not rank, is_main: true on some ranks, false on others. With `or` it may be true on all."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(is_for_some(script, v) for v in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_rank(script, test.operand) or is_for_some(script, test.operand)
    if isinstance(test, ast.Compare):
        return is_rank(script, test.left) and _splits_the_ranks(test)
    name = script.called(test) or script.full_name(test)
    return name.rsplit(".", 1)[-1] in ("is_main", "is_master", "is_main_process", "is_master_process")


def _splits_the_ranks(test: ast.Compare) -> bool:
    """`rank == 0` does. `rank >= 0` holds on all, and `local_rank != -1` asks whether there is a group at all."""
    number = test.comparators[0].value if isinstance(test.comparators[0], ast.Constant) else None
    if len(test.ops) != 1 or not isinstance(number, int):
        return False
    return isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Gt | ast.LtE) or (
        isinstance(test.ops[0], ast.Lt | ast.GtE) and number > 0
    )


def is_rank(script: Script, node: ast.expr) -> bool:
    """Whether a number is a rank, or named like one."""
    kinds = script.kinds(node)
    if Kind.UNKNOWN not in kinds:
        return True
    return name_of(node) in ("rank", "local_rank", "global_rank", "world_rank")


def _others_join(script: Script, call: ast.Call, guard: ast.If, name: str) -> bool:
    """Whether the ranks that do not pass may call it elsewhere: `if rank: barrier(); load(); if not rank: …`."""
    function = script.function(call)
    for other in script.calls_to(name):
        if other is call or script.function(other) is not function or _same_branch(guard, call, other):
            continue
        if any(script.depends_on_rank(test) for test in script.enclosing_tests(other)):
            return True
    branches = [*guard.body, *guard.orelse] if guard.orelse else []
    calls = [c for statement in branches for c in ast.walk(statement) if isinstance(c, ast.Call) and c is not call]
    return any(_may_call(script, c, name) for c in calls if not _same_branch(guard, call, c))


def _same_branch(guard: ast.If, one: ast.AST, two: ast.AST) -> bool:
    return any(
        any(n is one for s in branch for n in ast.walk(s)) and any(n is two for s in branch for n in ast.walk(s))
        for branch in (guard.body, guard.orelse)
    )


def _may_call(script: Script, call: ast.Call, name: str) -> bool:
    """Whether a call may lead to that collective: itself, by a function of the file, or by one that is not known."""
    if script.called(call) == name:
        return True
    defined = script.definition(call.func)
    if isinstance(defined, Function):
        inner = [n for n in ast.walk(defined) if isinstance(n, ast.Call)]
        return any(script.called(n) in (name, "") or script.definition(n.func) for n in inner)
    full = script.called(call)
    return not full.startswith(("torch.", "print", "os.", "time.", "logging.", "len", "range", "str", "int"))


def _short(script: Script, call: ast.Call) -> str:
    return script.called(call).removeprefix("torch.distributed.")
