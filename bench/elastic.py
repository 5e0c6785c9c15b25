"""Measure a job that changes its size: kills, nodes that leave and nodes that come, with ddprun and with torchrun.

    python bench/elastic.py                                     # 100 changes in 10 minutes, then 4 under torchrun
    python bench/elastic.py --changes 10 --seconds 60 --megabytes 100
    KUBECONFIG=… DDPJOB_TEST_NODE=… python bench/elastic.py --cluster --changes 20

1 to 4 nodes on this machine, two ranks each; node 0 stays. A change kills nodes, sends SIGTERM to their agents (as
`ddpjob run --resize` does), or starts nodes. The cost of a change is the time from rank 0's last step before the change
to its first step after it. Parts of the cost: detection (until a rank writes its state or stops), rescue (until all
ranks have written), stop (until all have ended), restart (until the last rank runs the script), load, first step. At
the end one process trains the same steps, for comparison. The model has --megabytes of parameters, and a rank waits
--pause seconds after each step.

--cluster needs an operator, and nodes that run on this machine: the pods' folder is a folder of this machine, and pods
are killed by their processes here. DDPJOB_TEST_NODE breaks nodes, as in tests/cluster; without it no node is broken.
Each of EVENTS is two changes: fewer nodes train, and all of them train again. --snooze is ddprun's.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import common
import psutil
import torch
from clusters import kubectl, until
from common import ONE_THREAD, kill, shown
from free_port import free_port
from pods import Space, job, spread, trainer

NPROC, NODES, SETTLED_STEPS, HUNG_SECONDS, SAMPLES, BATCH = 2, 4, 10, 90.0, 256, 16
NAME, EVENTS = "elastic", ("kill", "delete", "scale", "power", "kill", "cut", "delete", "kill", "scale", "kill")
Raw = dict[str, Any]
PARTS = ("detection", "rescue", "stop", "restart", "load", "first step")
LINE_BYTES = 20
TRAIN = """
import os, sys, time
began = time.monotonic()
import torch, ddpjob
from ddpjob.checkpoint.in_memory.survivor import Survivor
rank, life = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
names = f"notes-{os.uname().nodename}-{os.getpid()}", "now"
notes, now = (os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) for name in names)
def note(what, step=0, at=None, samples=()):
    os.write(notes, f"{what} {rank} {life} {at or time.monotonic()} {step} {','.join(map(str, samples))}\\n".encode())
def noted(survivor, save=Survivor.save):
    note("told")
    save(survivor)
    note("wrote")
note("began", at=began)
Survivor.save = noted
total = lambda: int(open("total").read()) if os.path.exists("total") else 1 << 40
with ddpjob.init("gloo") as world:
    torch.manual_seed(2)
    x, y, width = torch.randn(256, 64), torch.randn(256, 1), int(sys.argv[2]) * 2**20 // (4 * 65)
    net = torch.nn.Linear(64, width)
    model, optimizer = world.wrap(net), torch.optim.SGD(net.parameters(), lr=0.01 / width, momentum=0.9)
    sampler = ddpjob.GlobalBatchSampler(len(x), global_batch=16, seed=3)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)
    note("loaded", step)
    while step < total():
        for batch in sampler.epoch(sampler.current_epoch):
            note("batch", step + 1, samples=batch)
            optimizer.zero_grad()
            ddpjob.accumulate(model, batch, sampler.global_batch, lambda i: (model(x[i]) - y[i]).square().sum())
            optimizer.step()
            step += 1
            note("step", step)
            if rank == "0":
                os.write(now, f"{world.world_size:9} {step:9}\\n".encode())
            stop = ddpjob.should_stop(step)
            if stop or step % 100 == 0:
                snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
            if stop:
                note("told", step)
                raise ddpjob.Stopped(step)
            time.sleep(float(sys.argv[1]))
            if step >= total():
                break
    snapshot.close()
    if world.is_main:
        torch.save([p.detach() for p in net.parameters()], "result.pt")
"""


class Note(NamedTuple):
    """A line that a rank has written."""

    what: str
    rank: int
    life: int
    at: float
    step: int
    samples: str


class Training:
    """A training whose ranks write notes into a folder of this machine."""

    patience = HUNG_SECONDS

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ended(self) -> str:
        """Return the end of the log if the training has ended, else ""."""
        raise NotImplementedError

    def trains(self, ranks: int) -> int:
        """Wait until this number of ranks has made some steps. Return the last step. Raise TimeoutError."""
        deadline, size, since, step = time.monotonic() + self.patience, 0, 0, 0
        while size != ranks or step < since + SETTLED_STEPS:
            if time.monotonic() > deadline or self.ended():
                raise TimeoutError(self.ended() or f"{ranks} ranks do not train, but {size}")
            time.sleep(0.02)
            with contextlib.suppress(OSError), (self.folder / "now").open("rb") as file:
                file.seek(-LINE_BYTES, os.SEEK_END)
                before, (size, step) = size, map(int, file.read(LINE_BYTES).split())
                since = since if size == before == ranks else step
        return step

    def notes(self) -> list[Note]:
        """Return what all ranks have noted, in the order of time."""
        words = (line.split(" ") for path in self.folder.glob("notes-*") for line in path.read_text().splitlines())
        return sorted(
            (Note(w[0], int(w[1]), int(w[2]), float(w[3]), int(w[4]), w[5]) for w in words), key=lambda n: n.at
        )


class Job(Training):
    """The agents of one job on this machine, by node."""

    def __init__(self, launcher: str, folder: Path, *script: object) -> None:
        super().__init__(folder)
        self._launcher, self._port = launcher, free_port()
        self._words = [f"--nnodes=1:{NODES}", f"--nproc-per-node={NPROC}", "--max-restarts=1000", "--rdzv-id=bench"]
        self._words += ["train.py", *map(str, script)]
        self.agents: dict[int, psutil.Popen] = {}
        self._replaced: collections.Counter[int] = collections.Counter()
        self.restarts: list[float] = []
        """Times at which all ranks of a generation had ended, as node 0's agent logs them."""

    def start(self, node: int) -> None:
        port = self._port
        where = ["ddprun", f"--master-port={port}", f"--node-rank={node}", "--rdzv-conf=last_call_timeout=0,snooze=0"]
        if self._launcher == "torchrun":
            conf = f"--rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}"
            where = ["torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", conf]
        own = ONE_THREAD | {"DDPJOB_REPLACEMENT": str(self._replaced[node]), "DDPJOB_TERMINATION_LOG": ""}
        self._replaced[node] += 1
        log = (self.folder / f"log-{node}").open("a")
        self.agents[node] = psutil.Popen(
            [sys.executable, "-m", *where, *self._words],
            cwd=self.folder,
            env=os.environ | own | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=log if node else subprocess.PIPE,
            text=True,
        )
        if node == 0:
            threading.Thread(target=self._hear, args=(self.agents[0].stderr, log), daemon=True).start()

    def _hear(self, said: Any, log: Any) -> None:
        for line in said:
            self.restarts += [time.monotonic()] if line.startswith("ddprun: restart") else []
            print(line, end="", file=log, flush=True)

    def end(self, node: int, number: int) -> None:
        """End a node; SIGKILL ends all its processes, as a power cut does."""
        agent = self.agents.pop(node)
        kill(agent) if number == signal.SIGKILL else agent.send_signal(number)
        agent.wait(HUNG_SECONDS)

    def ended(self) -> str:
        return "" if self.agents[0].poll() is None else (self.folder / "log-0").read_text()[-3000:]


def change(job: Job, draw: random.Random) -> Raw:
    """Go to another number of nodes."""
    here = len(job.agents)
    wanted = draw.choice([n for n in range(1, NODES + 1) if n != here])
    kind = "come" if wanted > here else draw.choices(["kill", "leave"], [2, 1])[0]
    away, present = set(range(NODES)) - set(job.agents), set(job.agents) - {0}
    nodes = draw.sample(sorted(away if kind == "come" else present), abs(wanted - here))
    began = time.monotonic()
    for node in nodes:
        job.start(node) if kind == "come" else job.end(node, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    job.trains(NPROC * wanted)
    return {"kind": kind, "at": began, "settled": time.monotonic()}


def measured(one: Raw, notes: list[Note], restarts: list[float]) -> Raw:
    """Replace the times of a change by its cost, and by its parts if there was one restart."""
    at, settled = one.pop("at"), one.pop("settled")
    steps = [n for n in notes if n.what == "step" and n.rank == 0 and n.at <= settled]
    pairs = [(a, b) for a, b in itertools.pairwise(steps) if a.life != b.life and b.at > at]
    one["cost"] = sum(after.at - max(before.at, at) for before, after in pairs)
    ended = [moment for moment in restarts if at < moment < settled]
    if len(pairs) == len(ended) == 1:
        (before, after), times = pairs[0], collections.defaultdict(list)
        for n in notes:
            times[n.what, n.life].append(n.at)
        told = [moment for moment in times["told", before.life] if moment > at] or [before.at]
        begin = at if one["kind"] == "kill" else min(told)  # new nodes import torch earlier, while the others train
        ends = [min(told), max(times["wrote", before.life], default=max(told)), ended[0]]
        ends += [max(times["began", after.life]), max(times["loaded", after.life]), after.at]
        one |= dict(zip(PARTS, (b - a for a, b in itertools.pairwise([begin, *ends])), strict=True))
    return one


def repeated(notes: list[Note]) -> tuple[int, int]:
    """Return how many steps were repeated, and in how many epochs a sample is missing or comes twice."""
    begins, lives = {n.life: n.step for n in notes if n.what == "loaded"}, collections.defaultdict(set)
    for n in notes:
        if n.what == "step":
            lives[n.step].add(n.life)
    seen: dict[int, list[str]] = collections.defaultdict(list)
    for n in notes:  # a rank may be stopped after a step and before its note, so the next load shows which steps count
        if n.what == "batch" and n.samples and n.life == max(life for life, step in begins.items() if step < n.step):
            seen[(n.step - 1) * BATCH // SAMPLES] += n.samples.split(",")
    epochs = (seen[epoch] for epoch in range(max(lives, default=0) * BATCH // SAMPLES))
    wrong = sum(len(epoch) != SAMPLES or len(set(epoch)) != SAMPLES for epoch in epochs)
    return sum(len(its) - 1 for its in lives.values()), wrong


def difference(folder: Path, total: int, mb: int) -> float:
    """Return the relative L2 distance to the parameters of one undisturbed process after the same steps."""
    (alone := folder / "alone").mkdir()
    (alone / "total").write_text(str(total))
    words = [sys.executable, folder / "train.py", "0", str(mb)]
    subprocess.run(words, cwd=alone, env=os.environ | ONE_THREAD, check=True, capture_output=True)
    one, other = (torch.cat([p.flatten() for p in torch.load(path / "result.pt")]) for path in (folder, alone))
    return float((one - other).norm() / other.norm())


def run(launcher: str, changes: int, given: argparse.Namespace, folder: Path) -> None:
    """Let a job change its size, and print what its changes cost."""
    job, draw, found = Job(launcher, folder, given.pause, given.megabytes), random.Random(given.seed), []
    end, total = "hung", 0
    try:
        for node in range(NODES):
            job.start(node)
        job.trains(NPROC * NODES)
        began = time.monotonic()
        for number in range(changes):
            found.append(change(job, draw))
            time.sleep(max(0.0, began + given.seconds / given.changes * (number + 1) - time.monotonic()))
        (folder / "total").write_text(str(last := job.trains(NPROC * len(job.agents)) + 100))
        end, total = f"exit codes {[agent.wait(HUNG_SECONDS) for agent in job.agents.values()]}", last
    except (TimeoutError, psutil.TimeoutExpired) as error:
        print(error)
    finally:
        for node in list(job.agents):
            job.end(node, signal.SIGKILL)
    notes = job.notes()
    found = [measured(one, notes, job.restarts) for one in found]
    summary(launcher, found, notes, end, folder, total, given.megabytes)


def summary(launcher: str, found: list[Raw], notes: list[Note], end: str, folder: Path, total: int, mb: int) -> None:
    """Print the medians by kind of change, and what happened to the steps, the samples and the parameters."""
    for kind, part in itertools.product(sorted({one["kind"] for one in found}), ("cost", "beyond detection", *PARTS)):
        if known := [one[part] for one in found if one["kind"] == kind and part in one]:
            print(f"  {kind}: {part}: {shown(known)}")
    at = [n.at for n in notes if n.what == "step" and n.rank == 0]
    goodput = 1 - sum(one["cost"] for one in found) / (at[-1] - at[0]) if len(at) > 1 else 0.0
    if total:
        end += f"; relative L2 to one undisturbed process {difference(folder, total, mb):.1e}"
    steps, epochs = repeated(notes)
    print(f"{launcher}: {len(found)} changes, goodput {goodput:.1%}; {steps} steps repeated, ", end="")
    print(f"{epochs} epochs with a sample missing or twice; {end}", flush=True)


class Pods(Training):
    """A job of four pods with two ranks each. Any of them may be lost, also the leader's."""

    patience = 400.0

    def __init__(self, space: Space, folder: Path, snooze: float, *script: object) -> None:
        super().__init__(folder)
        self._space = space
        body = spread(job(NAME, nodes=NODES, minNodes=1, backoffLimit=1000))
        conf = f"--rdzv-conf=last_call_timeout=60,snooze={snooze:g}"
        trainer(body).update(
            command=["ddprun", conf, f"--nproc-per-node={NPROC}", "train.py", *map(str, script)],
            workingDir=str(folder),
            env=[{"name": "OMP_NUM_THREADS", "value": "1"}],
            resources={"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
            securityContext={"runAsUser": 0},
            volumeMounts=[{"name": "notes", "mountPath": str(folder)}],
        )
        pod = body["spec"]["template"]["spec"]
        pod.update(securityContext={}, volumes=[{"name": "notes", "hostPath": {"path": str(folder)}}])
        space.apply(body)

    def ended(self) -> str:
        status = self._space.status(NAME)
        return json.dumps(status, indent=1) if status.get("state") in ("Succeeded", "Failed") else ""

    def strike(self, event: str, draw: random.Random) -> tuple[int, str, list[str]]:
        """Let something happen. Return how many nodes are left, whether the leader was lost, and how to undo it."""
        known = self._space.pods(NAME).items()
        pods = {name: pod["spec"]["nodeName"] for name, pod in known if pod["status"]["phase"] == "Running"}
        leader = self._space.status(NAME).get("leader", {}).get("place", 0)
        chosen = draw.sample(sorted(pods), draw.randint(1, NODES - 1))
        undo: list[str] = []
        if event == "scale":
            chosen = sorted(pods)[draw.randint(1, NODES - 1) :]
            self._scale(NODES - len(chosen))
        elif event == "delete":
            self._space.kubectl("delete", "pod", "--wait=false", *chosen)
        elif event == "kill":
            kill_pods(chosen)
        else:
            # A leader without network goes on for 30 s with the nodes on its side, as the documents say.
            its = next(node for name, node in pods.items() if place(name) == leader)
            node = draw.choice(sorted({node for node in pods.values() if event == "power" or node != its}))
            chosen = [name for name, its in pods.items() if its == node]
            on_node("kill" if event == "power" else "cut", node)
            undo = ["start" if event == "power" else "join", node]
        return NODES - len(chosen), " of the leader" if leader in map(place, chosen) else "", undo

    def _scale(self, nodes: int) -> None:
        self._space.kubectl("scale", "ddpjob", NAME, f"--replicas={nodes}")

    def undo(self, event: str, undo: list[str]) -> None:
        if event == "scale":
            self._scale(NODES)
        if undo:
            on_node(*undo)

    def finish(self) -> str:
        """Wait for the end. Return what the status and the pods show."""
        status = self._space.ends(NAME)
        restarts = sum(p["status"]["containerStatuses"][0]["restartCount"] for p in self._space.pods(NAME).values())
        counts = {name: status["restarts"][name] for name in ("application", "infrastructure", "stall")}
        return f"{status['state']}, attempt {status['attempt']}, charged {counts}, {restarts} containers restarted"


def place(pod: str) -> int:
    return int(pod.split("-")[2])


def kill_pods(pods: list[str]) -> None:
    """Send SIGKILL to all processes of these pods."""
    names = {f"{NAME}-{place(pod)}" for pod in pods}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOSTNAME") in names:
                process.kill()


def on_node(*words: str) -> None:
    subprocess.run([*shlex.split(os.environ["DDPJOB_TEST_NODE"]), *words], check=True, capture_output=True, timeout=120)


def changes_of(notes: list[Note], events: list[tuple[float, str]]) -> list[Raw]:
    """Return each change of the group: its event, its sizes and its cost. A planned one costs what rank 0 waits for;
    after a loss the cost beyond detection begins when the first survivor has seen it."""
    ranks: dict[int, set[int]] = collections.defaultdict(set)
    for n in notes:
        if n.what == "step":
            ranks[n.life].add(n.rank)
    found = []
    for before, after in itertools.pairwise(n for n in notes if n.what == "step" and n.rank == 0):
        if before.life < after.life:
            sizes, event = (len(ranks[before.life]), len(ranks[after.life])), [e for at, e in events if at < after.at]
            kind = "come" if sizes[0] < sizes[1] else event[-1] if event else "start"
            told = [n.at for n in notes if n.what == "told" and before.at < n.at < after.at and not n.step]
            seconds = {"cost": after.at - before.at, "beyond detection": after.at - min(told, default=before.at)}
            found.append({"kind": kind, **seconds})
    return found


def run_in_cluster(launcher: str, changes: int, given: argparse.Namespace, folder: Path) -> None:
    """Let a job in the cluster change its size, and print what its changes cost."""
    space = Space("ddpjob-bench")
    kubectl("label", "namespace", space.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
    pods, draw = Pods(space, folder, given.snooze, given.pause, given.megabytes), random.Random(given.seed)
    whats = [event for event in EVENTS if event not in ("power", "cut") or os.environ.get("DDPJOB_TEST_NODE")]
    events, undo = list[tuple[float, str]](), list[str]()
    end, total = "hung", 0
    try:
        pods.trains(NPROC * NODES)
        while len(changes_of(notes := pods.notes(), events)) < changes:
            what, last = whats[len(events) % len(whats)], max(n.life for n in notes)
            began = time.monotonic()
            left, leader, undo = pods.strike(what, draw)
            events.append((began, what + leader))
            until(lambda last=last: any(n.life > last for n in pods.notes()), f"{what} has an effect", pods.patience)
            if what == "scale":
                pods.trains(NPROC * left)
            pods.undo(what, undo)
            undo = []
            pods.trains(NPROC * NODES)
            print(f"{what}{leader}: {NODES - left} nodes, {time.monotonic() - began:.0f} s until all train", flush=True)
        (folder / "total").write_text(str(step := pods.trains(NPROC * NODES) + 100))
        end, total = pods.finish(), step
    except TimeoutError as error:
        print(error, space.kubectl("get", "ddp,pods", "-o", "wide", check=False), sep="\n")
    finally:
        if undo:
            on_node(*undo)
        space.leaves_nothing()
        space.remove()
    notes = pods.notes()
    summary(launcher, changes_of(notes, events), notes, end, folder, total, given.megabytes)


def main() -> None:
    words = {"changes": 100, "seconds": 600.0, "torchrun": 4, "megabytes": 1, "pause": 0.02, "seed": 1}
    given = common.options(__doc__, **words, cluster=False, snooze=30.0)
    print(common.machine())
    runs = {"cluster": given.changes} if given.cluster else {"ddprun": given.changes, "torchrun": given.torchrun}
    for launcher, changes in runs.items():
        with common.script(TRAIN, "/var/tmp") as folder:
            if changes:
                (run_in_cluster if given.cluster else run)(launcher, changes, given, folder)
        print(common.machine())


if __name__ == "__main__":
    main()
