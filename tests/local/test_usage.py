"""CPU and memory that the nodes of a local run use, and which of their processes are ranks, from real processes."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell import eventually

from ddpjob_cli.local.processes import ranks as ranks_of_nodes
from ddpjob_cli.local.shown.usage import SeenUsage, Usages, parse
from ddprun import processes

SLEEP = "import time; time.sleep(1000)"
Node = Callable[..., int]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Yield a function that starts a script below a process which stands for a supervisor, and returns its pid."""
    started = []

    def start(script: str, **variables: str) -> int:
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(script)!r}])"
        process = subprocess.Popen([sys.executable, "-c", child], env=os.environ | variables, start_new_session=True)
        started.append(process)
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def seen(usages: Usages, pid: int, shown: Callable[[SeenUsage], object]) -> SeenUsage:
    def look() -> SeenUsage | None:
        usages.look({pid: ()})
        found = usages.seen.get(pid)
        return found if found is not None and shown(found) else None

    found: SeenUsage = eventually(look)
    return found


def test_the_cpu_and_memory_of_a_node_are_those_of_all_its_processes(node: Node) -> None:
    """CPU and memory of a node must be those of all its processes, and not of the launcher above them."""
    busy = node("held = bytearray(300_000_000)\nwhile True: pass")
    idle = node(SLEEP)
    usages = Usages(seconds=0.3)
    found = seen(usages, busy, lambda s: s.usage is not None and s.usage.memory_bytes > 300_000_000)
    assert found.usage is not None
    time_used = seen(usages, busy, lambda s: s.usage is not None and s.usage.cpu_percent > 3)  # a launcher uses 0 %
    assert time_used.usage.cpu_percent < 250
    quiet = seen(usages, idle, lambda s: s.usage is not None)
    assert quiet.usage.memory_bytes < 200_000_000
    assert quiet.usage.gpu_percent is None


def test_the_pids_are_those_of_the_ranks_and_not_of_launchers_or_workers(node: Node, tmp_path: Path) -> None:
    """The pids must be those of ranks, on which users run py-spy, and not of launchers or workers."""
    launcher = f"""
        import os, subprocess, sys, time
        worker = "import time; time.sleep(1000)"
        rank = "import os, subprocess, sys; out = os.environ['OUT'] + '/' + os.environ['RANK'];"
        rank += f"open(out, 'w').write(str(os.getpid())); subprocess.run([sys.executable, '-c', {{worker!r}}])"
        for r in (1, 0):
            env = {{"RANK": str(r), "LOCAL_RANK": str(r), "OUT": {str(tmp_path)!r}}}
            env = os.environ | env
            subprocess.Popen([sys.executable, "-c", rank], env=env)
        time.sleep(1000)
    """
    pid = node(launcher)
    found = seen(Usages(seconds=0.1), pid, lambda s: len(s.pids) == 2)
    ranks = [eventually(lambda r=r: (tmp_path / str(r)).exists() and (tmp_path / str(r)).read_text()) for r in (0, 1)]
    assert found.pids == tuple(map(int, ranks))


@pytest.mark.parametrize("has_first_server", [True, False])
def test_only_the_ranks_of_a_fork_server_count(node: Node, tmp_path: Path, has_first_server: bool) -> None:
    """Only ranks below a fork server must count: `--fail every=10s` must not kill the second server."""
    launcher = f"""
        import pathlib, subprocess, sys, time
        words = [sys.executable, "-c", "import time; time.sleep(1000)", "/ddprun/forkserver.py"]
        def start(session):
            made = subprocess.Popen(words, start_new_session=session).pid
            time.sleep(0.05)  # the order in which they began shows in hundredths of a second
            return made
        start({has_first_server})
        pids = [start(True), start(True)]
        pathlib.Path({str(tmp_path / "pids.new")!r}).write_text(" ".join(map(str, pids)))
        pathlib.Path({str(tmp_path / "pids.new")!r}).rename({str(tmp_path / "pids")!r})
        time.sleep(1000)
    """
    pid = node(launcher)
    ranks = eventually(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    try:
        assert ranks_of_nodes.of_node(pid, processes.parents()) == tuple(map(int, ranks.split()))
    finally:
        processes.kill(processes.descendants(pid))  # the ranks have sessions of their own, so kill them one by one


def test_a_measurement_costs_little_and_is_not_repeated_at_once(node: Node) -> None:
    """A measurement must cost little and not be repeated at once, because the table is drawn twice a second."""
    usages, pid = Usages(seconds=1000), node(SLEEP)
    usages.look({pid: ()})
    first = usages.seen[pid]
    began = time.process_time()
    for _ in range(1000):
        usages.look({pid: ()})
    assert time.process_time() - began < 1
    assert usages.seen[pid] is first


def test_nvidia_smi_is_read_by_index_and_uuid_and_a_gpu_without_values_is_omitted() -> None:
    """A GPU without values, such as a MIG slice, must be left out without a traceback."""
    listing = "0, GPU-aa, 87, 12000\n1, GPU-bb, [N/A], [N/A]\nan error\n\n"
    assert parse(listing) == {"0": (87.0, 12000 << 20), "GPU-aa": (87.0, 12000 << 20)}
