"""DDPJobs that an API server accepts and that cause as much work as possible, and the operator's work on them."""

import contextlib
import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgspec
import orjson
from worlds import START, World, manifest

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.ports import exposition
from ddpjob_operator.kube.watch.store import Jobs
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.kube.work.job_state import JobStates
from ddpjob_operator.kube.work.reconcile import is_large
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.plan import invalid_job
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import build

BYTES_MAX = 1_500_000  # limit of etcd for one object
Raw = dict[str, Any]
Put = Callable[[Raw, int, random.Random], None]

SHELL = (
    "'\"$(", "\n", "torchrun x | tee y; ", "(", "--nnodes ", "exec ", "if ", "<<E\n", "`", "a && ", "/", "${", "A=$A ",
    "\\\n", "[[ ", "case x in ", "f(){ ", "env ", "password=", "python -m torch.distributed.run ", "mpirun ", "; ",
    "token=a1b2c3d4 ", "x`x` ", "((a+b));", "a;", "if a;then b;fi;", "<(a)", "kill -9 $a;",
)  # fmt: skip
FIELDS = ("activeDeadlineSeconds", "enableServiceLinks", "hostnameOverride", "priorityClassName", "serviceAccountName")


def _name(draw: random.Random) -> str:
    kinds = (
        lambda: "".join(draw.choices("ab", k=draw.choice((3, 60, 250)))),
        lambda: "".join(draw.sample(field := draw.choice(FIELDS), len(field))),
        lambda: unicodedata.normalize("NFD", "".join(draw.choices("éüﬁ①Å", k=30))),
        lambda: draw.choice(("MASTER_ADDR", "RANK", "PET_NNODES", "A")),
    )
    return draw.choice(kinds)()


def _pod(raw: Raw) -> Raw:
    return raw["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def _trainer(raw: Raw) -> Raw:
    return _pod(raw)["containers"][0]  # type: ignore[no-any-return]


def _list(path: str, item: Callable[[str, int], Any]) -> Put:
    """Return a function that fills a list in the pod's spec or in its trainer's container."""

    def put(raw: Raw, count: int, draw: random.Random) -> None:
        *parents, last = path.split(".")
        at = raw if parents[:1] == ["spec"] else _trainer(raw) if parents[:1] == ["trainer"] else _pod(raw)
        for parent in [p for p in parents if p != "trainer"]:
            at = at.setdefault(parent, {})
        at[last] = [item(_name(draw), number) for number in range(count)]

    return put


def _names(at: Callable[[Raw], Raw], value: Any) -> Put:
    def put(raw: Raw, count: int, draw: random.Random) -> None:
        at(raw).update({_name(draw) + str(number): value for number in range(count)})

    return put


def _words(raw: Raw, count: int, draw: random.Random) -> None:
    of = (lambda: f"--nproc{_name(draw)}", lambda: "torchrun", lambda: _name(draw))
    _trainer(raw)["command"] = ["torchrun", *(draw.choice(of)() for _ in range(count))]


def _script(raw: Raw, count: int, draw: random.Random) -> None:
    words = draw.sample(SHELL, draw.choice((1, 1, 2, 5)))
    _trainer(raw)["command"] = ["bash", "-c", "".join(draw.choices(words, k=count * 25))]


def _mounts(raw: Raw, count: int, draw: random.Random) -> None:
    _pod(raw)["volumes"] = [{"name": _name(draw)} for _ in range(count // 2)]
    _trainer(raw)["volumeMounts"] = [{"name": _name(draw), "mountPath": _name(draw)} for _ in range(count // 2)]


def _deep(raw: Raw, count: int, _: random.Random) -> None:
    inner: Any = 1
    for _level in range(min(count, 250)):
        inner = [inner]
    _pod(raw)["zz"] = inner


_TERMS = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
_TERM = [{"key": "a", "operator": "In", "values": ["b"]}]
_RULE = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [1, 2]}}
PUTS: dict[str, Put] = {
    "containers": _list("containers", lambda _, i: {"name": f"t{i}", "image": "i", "comand": 1}),
    "init containers": _list("initContainers", lambda _, i: {"name": f"t{i}", "restartPolicy": "Always"}),
    "env": _list("trainer.env", lambda name, i: {"name": name, "value": f"$({name})"}),
    "ports": _list("trainer.ports", lambda name, i: {"containerPort": i % 65_535 + 1, "name": name}),
    "mounts": _mounts,
    "tolerations": _list("tolerations", lambda name, _: {"key": name, "effect": "NoSchedul", "operator": "Exists"}),
    "terms": _list(_TERMS, lambda name, _: {"matchExpressions": _TERM, "matchFields": [{"key": name}]}),
    "spread": _list("topologySpreadConstraints", lambda name, _: {"maxSkew": 1, "topologyKey": name}),
    "rules": _list("spec.failurePolicy.rules", lambda *_: _RULE),
    "annotations": _names(lambda raw: raw["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {}), "x"),
    "of the job": _names(lambda raw: raw["metadata"].setdefault("annotations", {}), "x"),
    "unknown of the pod": _names(_pod, 1),
    "unknown of the container": _names(_trainer, None),
    "limits": _names(lambda raw: _trainer(raw).setdefault("resources", {}).setdefault("limits", {}), "1e3Ki"),
    "small values": lambda raw, count, _: _pod(raw).update(zz=[[] for _ in range(count)]),
    "words": _words,
    "script": _script,
    "deep": _deep,
    "nodes": lambda raw, count, _: raw["spec"].update(nodes=min(count, 10_000)),
}  # fmt: skip
STATUSES: dict[str, Callable[[int], Any]] = {
    "startedNodes": lambda count: ",".join(["0-9999"] * count),
    "failures": lambda count: [{"attempt": 1, "message": "https://" * 30, "time": "2031-03-05T07:00:00Z"}] * count,
    "avoidedNodes": lambda count: [{"node": f"n{i}", "until": "2999-01-01T00:00:00Z"} for i in range(count)],
    "replacements": lambda count: {str(i): 2**50 for i in range(count)},
    "message": lambda count: "; the spec is invalid (" * count,
    "lastFailure": lambda n: {"attempt": 1, "nodeRank": 0, "time": "2031-03-05T07:00:00Z", "exception": "://a:" * n},
    "attempt": lambda count: -count,
    "attemptNodes": lambda count: count,
    "nodes": lambda count: {"total": count, "ready": 0},
    "progress": lambda n: {"step": 1, "updated": "2031-03-05T07:00:00Z", "metrics": {f"m{i}": "x" for i in range(n)}},
    "conditions": lambda count: [{"type": f"C{i}", "status": "True", "reason": "x"} for i in range(count)],
    "restarts": lambda count: {"chargedAt": ["2031-03-05T07:00:00Z"] * count},
}  # fmt: skip


def job(draw: random.Random) -> tuple[str, Raw]:
    """Return a random job of up to 1.5 MB, with a description."""
    raw, put = manifest(), []
    for name in draw.sample(sorted(PUTS), draw.choice((1, 1, 2, 3))):
        before, count = json.dumps(raw), int(10 ** draw.uniform(1, 4.5))
        PUTS[name](raw, count, draw)
        put.append(f"{count} {name}")
        if len(json.dumps(raw)) > BYTES_MAX:
            raw = json.loads(before)
    if draw.random() < 0.3:
        name, count = draw.choice(sorted(STATUSES)), int(10 ** draw.uniform(0, 4))
        raw["status"] = {"state": "Running", "attempt": 1, name: STATUSES[name](count)}
        put.append(f"{count} in status.{name}")
    return ", ".join(put), raw


def steps(raw: Raw) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the steps that the operator does without interruption for this job, in order, as functions."""
    content = orjson.dumps(raw)
    read = bounded_json.obj(content)  # longer JSON is read in a thread
    jobs = Jobs(lambda _key: None, bounded_json.job)
    states, key = JobStates(jobs), ("default", "digits")
    yield "store", lambda: (jobs.put(read), exposition.job(read))
    stored = jobs.get(key) or {}
    parsed: list[Any] = []

    def parse() -> None:
        with contextlib.suppress(validation.UnreadableJobError):
            parsed.append(states.parse(key, stored))

    yield "parse", parse
    if not parsed:
        yield "unreadable", lambda: invalid_job.unreadable_status(stored, "x" * 300, START)
        return
    ((read_job, problems),) = parsed
    if is_large(read_job):  # a large job is planned in a thread
        return
    yield from _planned(read_job, problems)


def _planned(job: api.DDPJob, problems: list[validation.Problem]) -> Iterator[tuple[str, Callable[[], object]]]:
    made: list[Any] = []
    yield "plan", lambda: made.append(plan(job, Observed(), START, problems=problems))
    yield "log", lambda: (list(decisions.lines(job, made[0])), decisions.decision(job, made[0]))
    yield "write", lambda: orjson.dumps(msgspec.to_builtins(made[0].status))
    if any(problem.unreadable for problem in problems) or not job.spec.template:
        return
    body: list[Any] = []
    yield "pod", lambda: body.append(build.pod(job, 1, 0, avoid=["n1"] * 10))
    yield "refusal", lambda: build.in_users_words("spec.containers[0].env[1]: " * 40, body[0], job)
    if not problems and job.status.state is None:
        world = World(job).running()
        yield "running", lambda: world.plan()
        world.exits(0, code=1)
        yield "failed", lambda: world.plan()


def calls(work: Callable[[], object]) -> int:
    """Return the number of function calls, also of C functions: it does not depend on the machine's load."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Run the block with full caches, because each process fills them only once."""
    for _, work in steps(manifest()):
        work()
    yield
