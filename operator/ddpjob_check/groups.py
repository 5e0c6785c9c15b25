"""Rules about the process group: its rendezvous, its backend, and its end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ddpjob_check.nodes import Function, before, has_hidden_arguments, is_main_guard, name_of, text_in, words_of
from ddpjob_check.options import UNKNOWN, ScriptOptions
from ddpjob_check.ranks import at
from ddpjob_check.reached import goes_on, is_otherwise
from ddpjob_check.rule import CheckedJob, Found, Severity, rule
from ddpjob_check.script import INIT, Script
from ddpjob_operator.job.launcher import NO_RENDEZVOUS_HOST

_ONLY_HERE = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?|0\.0\.0\.0)$")
_NUMBER = r"(?:[1-9]\d*|\{\w*\}|%[ds]|\$\{?\w+\}?|\$\(\w+\))"
_ITS_NAME = r"\$\(DDPJOB_NAME\)|\$\{?DDPJOB_NAME\}?"
NO_NAME = "without dns: all only node 0 has a DNS name; add spec.dns: all"
_TORCHRUN_STORE = "torchrun's own store listens on the port that the job gave it, and nothing listens on this one"


@rule(
    "error", wrong='os.environ["MASTER_ADDR"] = "localhost"', right='os.environ.setdefault("MASTER_ADDR", "localhost")'
)
def master_overwritten(script: Script, job: CheckedJob) -> Iterator[Found]:
    """The job sets MASTER_ADDR and MASTER_PORT to the address of rank 0. A node with another address waits for itself,
    and under torchrun nothing listens on another port."""
    several, is_used = job.several_nodes(script), _meets_by_environment(script)
    for name, value, node in script.variables_set:
        texts = fixed_texts(script, value, node)
        if name == "MASTER_ADDR" and several and texts and all(map(NO_RENDEZVOUS_HOST.match, texts)):
            severity, where = several
            if job.local or not is_used or not all(map(_ONLY_HERE.match, texts)):  # the value may be a node's address
                severity = "warning"
            message = (
                f'os.environ["MASTER_ADDR"] = "{texts[0]}": {where} each node looks for rank 0 at a wrong address; '
            )
            yield at(node, message + "remove it: the job sets MASTER_ADDR", severity)
        elif name == "MASTER_PORT" and texts and _port_hurts(job):
            because = _TORCHRUN_STORE if job.by_torchrun else "the operator has chosen a free port"
            message = f'os.environ["MASTER_PORT"] = "{texts[0]}": {because}; remove it: the job sets MASTER_PORT'
            yield at(node, message, "error" if job.by_torchrun and is_used else "warning")


@rule("error", wrong='os.environ["RANK"] = "0"', right='os.environ.setdefault("RANK", "0")')
def rank_overwritten(script: Script, job: CheckedJob) -> Iterator[Found]:
    """The job sets RANK, LOCAL_RANK and WORLD_SIZE for each process. A fixed value in the script, left over from one
    GPU, is the same on all: the group never forms, or each process forms one of its own."""
    if job.has_one_rank or script.starts:
        return
    for name, value, node in script.variables_set:
        texts = fixed_texts(script, value, node) if name in _OF_RANKS else []
        if texts and all(text.isdecimal() for text in texts) and not _comes_too_late(script, node):
            found = _rank_hurts(script, job, name, texts[0])
            if found:
                severity, so = found
                yield at(node, f'os.environ["{name}"] = "{texts[0]}": {so}; remove it: the job sets {name}', severity)


_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def _rank_hurts(script: Script, job: CheckedJob, name: str, text: str) -> tuple[Severity, str] | None:
    """Return severity and consequence of this value of a variable in all processes; None if it is correct."""
    # The variables are used if the call passes no rank, or a rank that was read from RANK or a similar variable.
    ranks = [script.argument(call, "rank", 4 if script.called(call) == INIT else None) for call in script.inits]
    read = [r is None or any(script.variable_read(o) in _OF_RANKS for o in _within(script, r)) for r in ranks]
    world, is_used = job.world_size, any(read) and _meets_by_environment(script)
    several = (world or job.nodes or 1) > 1
    if name == "LOCAL_RANK":
        severity: Severity = "error" if (job.nproc or 1) > 1 and job.gpus else "warning"
        return None if job.nproc == 1 else (severity, f"all processes of a node take its GPU {text}")
    if name == "WORLD_SIZE" and job.is_elastic:
        return None  # the rule elastic-fixed-world reports a fixed WORLD_SIZE
    severity = "error" if several and is_used else "warning"
    if name == "RANK":
        return severity, f"all {world or ''} processes believe that they are rank {text}".replace("  ", " ")
    if world is not None and int(text) == world:
        return None
    return severity, f"the job has {world or 'another number of'} ranks, so the group does not form"


def _meets_by_environment(script: Script) -> bool:
    """True if the group forms by MASTER_ADDR and similar variables: no call passes a URL other than env://."""
    methods = [script.argument(c, "init_method", 1) for c in script.calls_to(INIT)]
    return not any(texts and texts != ["env://"] for texts in map(script.texts, methods))


def _within(script: Script, value: ast.expr) -> Iterator[ast.AST]:
    return (n for o in script.origins(value) if isinstance(o, ast.expr) for n in ast.walk(o))


def _comes_too_late(script: Script, node: ast.AST) -> bool:
    """True if this line comes after the call that forms the group, in the same function."""
    function, line = script.function(node), getattr(node, "lineno", 0)
    return any(script.function(call) is function and call.lineno < line for call in script.inits)


@rule(
    "error",
    wrong='dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=8)  # in a job with 2 ranks',
    right='dist.init_process_group("gloo")',
)
def world_size_differs(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only if the nodes and the processes per node are known. A group waits for world_size ranks. If the job has fewer,
    it never forms; if the job has more, the others are refused."""
    world = job.world_size
    if world is None or script.starts or not (job.by_torchrun or job.launcher in ("", "ddprun", "python")):
        return
    options = ScriptOptions(script, job.words)
    for call in script.calls_to(INIT):
        size = script.argument(call, "world_size", 3)
        number = UNKNOWN if size is None else options.value(size)
        if size is not None and type(number) is int and number not in (-1, world) and not is_otherwise(script, call):
            is_fixed = all(isinstance(o, ast.Constant) for o in script.origins(size))
            text = f"world_size={script.text_of(size)}" + ("" if isinstance(size, ast.Constant) else f" is {number}")
            nodes = f"{job.nodes} node{'s' if job.nodes != 1 else ''} with {job.nproc}"
            wait = "the group waits for more ranks than there are" if number > world else "ranks beyond it are refused"
            yield at(
                size,
                f"{text}, but the job has {world} ranks ({nodes}): {wait}; leave it out, or use "
                'int(os.environ["WORLD_SIZE"])',
                "error" if is_fixed or job.known else "warning",
            )


@rule("warning", wrong='os.environ["MASTER_PORT"] = "29500"', right='os.environ.setdefault("MASTER_PORT", "29500")')
def master_port_fixed(script: Script, job: CheckedJob) -> Iterator[Found]:
    """If two jobs on one machine use the same port, the second fails, or joins the group of the first."""
    if not (job.known or script.reads_launcher or job.nodes) or _port_hurts(job):
        return
    for name, value, node in script.variables_set:
        texts = fixed_texts(script, value, node)
        if name == "MASTER_PORT" and texts:
            yield at(
                node,
                f'os.environ["MASTER_PORT"] = "{texts[0]}": two jobs on one machine use the same port, and one of '
                f'them fails; use os.environ.setdefault("MASTER_PORT", "{texts[0]}"), because the job sets MASTER_PORT',
            )


def _port_hurts(job: CheckedJob) -> bool:
    return job.by_torchrun or (job.nodes or 0) > 1


def fixed_texts(script: Script, value: ast.expr, node: ast.AST) -> list[str]:
    """Return the literal values that a variable certainly gets; [] if a condition or an argument decides."""
    if any(not is_main_guard(test) for test in script.enclosing_tests(node)) or is_otherwise(script, node):
        return []
    if script.called(value) == "str" and isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    origins = script.origins(value)
    texts = [str(o.value) for o in origins if isinstance(o, ast.Constant) and isinstance(o.value, str | int)]
    return texts if len(texts) == len(origins) else []


@rule(
    "error",
    wrong='dist.init_process_group("gloo", init_method="tcp://node-0:23456", rank=rank, world_size=world_size)',
    right='dist.init_process_group("gloo")',
)
def tcp_under_torchrun(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torchrun tells its processes that its agent serves the store, so with tcp:// none of them opens one, and they
    wait until the timeout (torch 2.13)."""
    by_torchrun = any(script.variable_read(n) in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") for n in script.nodes)
    if not job.by_torchrun and (job.launcher or not by_torchrun):
        return
    for call, url in _methods(script, "tcp://"):
        where = "" if job.by_torchrun else "under torchrun "
        yield at(
            url,
            f"init_method={script.text_of(url)}: {where}all ranks wait for a store that none of them opens "
            "(TORCHELASTIC_USE_AGENT_STORE); remove init_method, or use ddpjob.init(init_method=…)",
            "error" if job.by_torchrun else "warning",
        )
        if script.called(call) != INIT:
            return


@rule(
    "error",
    wrong='dist.init_process_group("gloo", init_method="file:///tmp/meet", rank=rank, world_size=world_size)',
    right='dist.init_process_group("gloo")',
)
def file_not_shared(script: Script, job: CheckedJob) -> Iterator[Found]:
    """With file:// the rendezvous is a file. Nodes without a shared folder each wait at a file of their own."""
    if (job.nodes or 1) == 1:
        return
    for _, url in _methods(script, "file://"):
        mounts = [_mount_of(o, job.mounts) for o in script.origins(url) if isinstance(o, ast.expr)]
        apart = [mount for mount, shared in mounts if not shared]
        if not apart:
            continue
        mount = apart[0]
        because = f"each pod has a {mount} of its own" if mount else "no shared volume is mounted there"
        if job.local:
            because = f"in a cluster {because}"
        elif not job.known:
            because = "all of them must see the same folder"
        yield at(
            url,
            f"init_method={script.text_of(url)}: the rendezvous of {job.nodes} nodes is a file, and {because}; remove "
            "init_method, or put the file on a volume that all nodes mount",
            "error" if job.known and not job.local else "warning",
        )


def _mount_of(url: ast.AST, mounts: Mapping[str, bool]) -> tuple[str, bool]:
    """Return the mount that has this file, or "", and True if all nodes may share it."""
    path = _prefix(url).removeprefix("file://")
    mount = max((m for m in mounts if path.startswith(m.rstrip("/") + "/")), key=len, default="")
    if mount and mounts[mount]:
        return mount, True
    goes_on = not isinstance(url, ast.Constant)
    return mount, goes_on and any(shared and m.startswith(path) for m, shared in mounts.items())


def _methods(script: Script, scheme: str) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield calls of init_process_group, with init_method, if all its possible values have this scheme."""
    for call in script.calls_to(INIT):
        method = script.argument(call, "init_method", 1)
        origins = script.origins(method)
        certain = all(isinstance(o, ast.expr) and _prefix(o).startswith(scheme) for o in origins)
        if method and certain and not is_otherwise(script, call):
            yield call, method


def _prefix(node: ast.AST) -> str:
    """Return the text that a value certainly begins with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _prefix(node.values[0])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return _prefix(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _prefix(node.func.value)
    return text_in(node)


# ---------------------------------------------------------------- backends


def backends(script: Script, job: CheckedJob) -> set[str]:
    """Return the possible backends of the group; empty if they are unknown."""
    known: set[str] = set()
    for call in () if _other_backend_is_asked_for(job) else script.inits:
        given = script.argument(call, "backend", 0)
        texts = [t.lower() for t in script.texts(given)]
        if given is None and script.called(call) == "ddpjob.init" and job.backend:
            texts = [job.backend]
        if not texts:
            return set()
        known.update(texts)
    return known


@rule("error", wrong='dist.init_process_group("mpi")', right='dist.init_process_group("gloo")')
def backend_mpi(script: Script, job: CheckedJob) -> Iterator[Found]:
    """The backend mpi needs a PyTorch that was built with MPI, which no published wheel is."""
    for call in script.inits:
        given = script.argument(call, "backend", 0)
        if given and [t.lower() for t in script.texts(given)] == ["mpi"] and not script.mentions("is_mpi_available"):
            yield at(
                given,
                'backend "mpi" needs a PyTorch built with MPI, which no published wheel is; use "gloo" (CPU) or "nccl" '
                "(GPU)",
                "warning" if job.launcher in _OF_MPI else "error",
            )


_OF_MPI = ("mpirun", "mpiexec", "horovodrun")


@rule(
    "error",
    wrong='dist.init_process_group("nccl")',
    right='dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
)
def nccl_without_gpu(script: Script, job: CheckedJob) -> Iterator[Found]:
    """nccl moves data between GPUs only. If the pods of the job have none, the group does not form."""
    if job.gpus != 0 or _other_backend_is_asked_for(job):
        return
    for call in script.inits:
        given = script.argument(call, "backend", 0)
        asked = any(_asks_for_gpu(test) for test in script.enclosing_tests(call))
        asked = asked or any(isinstance(p, ast.Try) and any(map(goes_on, p.handlers)) for _, p in script.above(call))
        certain = given and [t.lower() for t in script.texts(given)] == ["nccl"]
        if given and certain and not asked and not is_otherwise(script, call):
            yield at(
                given,
                'backend "nccl" needs a GPU in each process, and the job has none; add nvidia.com/gpu to '
                'resources.limits, or use "gloo"',
            )


# Matches --backend=gloo, --dist_backend gloo, and overrides of configurations: backend=gloo, +trainer.backend=gloo.
_BACKEND_OPTION = re.compile(r"^[-+~]{0,2}(?:[\w.-]*[._-])?backend(?:[=:](.*))?$", re.IGNORECASE)


def _other_backend_is_asked_for(job: CheckedJob) -> bool:
    """True if the command has an option for a backend other than nccl. Its use in the script is not checked."""
    for word, following in pairwise((*job.words, "")):
        option = _BACKEND_OPTION.match(word)
        if option and (option[1] if option[1] is not None else following).strip("'\"").lower() != "nccl":
            return True
    return False


def _asks_for_gpu(test: ast.expr) -> bool:
    words = " ".join(ast.dump(test).lower().split())
    return any(w in words for w in ("cuda", "gpu", "nccl", "device"))


@rule(
    "warning",
    wrong='dist.init_process_group("gloo")\nif rank == 0:\n    preprocess(data)\ndist.barrier()',
    right='dist.init_process_group("gloo", timeout=timedelta(hours=6))\n'
    "if rank == 0:\n    preprocess(data)\ndist.barrier()",
)
def barrier_without_timeout(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A barrier on gloo waits 30 minutes for a missing rank, and its error does not name it. That may be too short
    while one rank prepares the data."""
    if backends(script, job) != {"gloo"} or (job.nodes is None and script.is_for_one_node):
        return
    inits = script.calls_to(INIT)
    if not inits or len(inits) != len(script.inits):  # ddpjob.init has its own timeouts
        return
    if any(script.argument(c, "timeout", 2) is not None or has_hidden_arguments(c) for c in inits):
        return
    for call in script.calls_to("torch.distributed.barrier"):
        work = _long_work_before(script, call)
        if script.argument(call, "group", 0) is None and work is not None:
            yield at(
                call,
                f"barrier() on gloo waits 30 min while one rank does {script.text_of(work)}, and its error does not "
                "name the missing rank; give init_process_group a timeout that is long enough, or use "
                "dist.monitored_barrier(timeout=…)",
            )
            return


def _long_work_before(script: Script, barrier: ast.Call) -> ast.Call | None:
    """Return a call before a barrier that only some ranks run and that may last longer than the timeout; else None."""
    for child, parent in script.above(barrier):
        for sibling in before(parent, child):
            if isinstance(sibling, ast.If) and script.depends_on_rank(sibling.test):
                calls = [n for s in sibling.body for n in ast.walk(s) if isinstance(n, ast.Call)]
                return next((c for c in calls if not words_of(name_of(c.func)).isdisjoint(_LONG_WORK)), None)
    return None


_LONG_WORK = set("convert encode extract index prepare preprocess tokenize untar unpack unzip".split())


@rule(
    "error",
    wrong='dist.init_process_group("nccl")\ndist.monitored_barrier()',
    right='dist.init_process_group("nccl")\ncpu = dist.new_group(backend="gloo")\ndist.monitored_barrier(cpu)',
)
def monitored_barrier_on_nccl(script: Script, job: CheckedJob) -> Iterator[Found]:
    """monitored_barrier needs send and recv on the CPU: it works with gloo only, and raises under nccl."""
    if backends(script, job) != {"nccl"}:
        return
    for call in script.calls_to("torch.distributed.monitored_barrier"):
        if script.argument(call, "group", 0) is None and not has_hidden_arguments(call):
            yield at(
                call,
                "monitored_barrier() works with gloo only, and this group is nccl; make a group for it: "
                'dist.new_group(backend="gloo")',
            )


@rule(
    "warning",
    wrong="def cleanup():\n    dist.destroy_process_group()\n\ntrain()",
    right="try:\n    train()\nfinally:\n    cleanup()",
)
def destroy_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A script that has a function to destroy the group, and never calls it, exits with the group open, and nccl warns
    at each exit. A script without such a function is not reported."""
    # A script without destroy_process_group is correct (docs/dev/upstream.md, groups).
    # Pending collectives complete when the process exits, even if nothing waits for them.
    if script.uses_a_framework or not any(script.on_every_rank(call) for call in script.inits):
        return
    functions = [script.function(call) for call in script.calls_to("torch.distributed.destroy_process_group")]
    if functions and all(f is not None and _is_forgotten(script, f) for f in functions):
        forgotten = next(f for f in functions if f is not None)
        yield at(
            forgotten,
            f"{forgotten.name}() destroys the group, but is never called; call it at the end, also after an exception: "
            "try: … finally:",
        )


def _is_forgotten(script: Script, function: Function) -> bool:
    """True if a function of this file is certainly never called: not by name, by its base class, or by a decorator."""
    inherits = isinstance(owner := script.scope(function), ast.ClassDef) and bool(owner.bases)
    special = function.name.startswith("__") or bool(function.decorator_list)
    return not (inherits or special or script.mentions(function.name))


@rule("warning", wrong="dist.isend(tensor, dst=1)", right="work = dist.isend(tensor, dst=1)\nwork.wait()")
def isend_without_wait(script: Script, job: CheckedJob) -> Iterator[Found]:
    """isend and irecv only begin a transfer: until wait() returns the tensor must not be used, and the message of a
    rank that exits before is lost."""
    for call in script.calls_to(*(f"torch.distributed.{name}" for name in ("isend", "irecv", "batch_isend_irecv"))):
        if isinstance(script.parent(call), ast.Expr):
            yield at(
                call,
                f"{script.text_of(call.func)}(…): its result is dropped, so this rank may change the tensor, or exit, "
                "before it is sent; keep the result, and call .wait() on it",
            )


def other_node(text: str, job: str) -> str:
    """Return the first DNS name in a text that may mean a node of this job other than node 0; "" if there is none."""
    name = f"(?:{re.escape(job)}|{_ITS_NAME})"
    found = re.search(rf"(?<![\w.-]){name}-{_NUMBER}\.{name}(?![\w-])", text)
    return found[0] if found else ""


@rule("warning", wrong='hosts = ["digits-0.digits", "digits-1.digits"]', right="dns: all  # in the spec of the job")
def other_node_named(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only if the job is known. Without `dns: all` the job's Service selects node 0 alone, so the names of the other
    nodes do not resolve."""
    if not job.only_leader_has_name:
        return
    documents = {node.value for node in script.nodes if isinstance(node, ast.Expr)}
    for node in script.nodes:
        if node not in documents and (name := other_node(_text(node), job.name)):
            yield at(node, f"{name}: {NO_NAME}")


def _text(node: ast.AST) -> str:
    """Return the text of a string or f-string, with {} for computed parts; "" for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return text_in(node)
