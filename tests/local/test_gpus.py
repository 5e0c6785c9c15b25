"""Each node of a local job gets its own GPUs, and only GPUs that the user allows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worlds import job

from ddpjob_cli.local import run
from ddpjob_cli.local.preparation import gpus
from ddpjob_cli.local.preparation.gpus import TooFewGpusError, share, visible

UUIDS = [f"GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a7{number}" for number in range(3)]
MIGS = [f"MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3{number}" for number in range(3)]
THREE = "".join(f"GPU {number}: NVIDIA H200 (UUID: {uuid})\n" for number, uuid in enumerate(UUIDS))
SLICED = (
    f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[0]})\n"
    f"  MIG 3g.20gb     Device  0: (UUID: {MIGS[0]})\n"
    f"  MIG 3g.20gb     Device  1: (UUID: {MIGS[1]})\n"
    f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[1]})\n"
    f"GPU 2: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[2]})\n"
    f"  MIG 7g.40gb     Device  0: (UUID: {MIGS[2]})\n"
)


@pytest.fixture(autouse=True)
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the test machine's own GPUs."""
    monkeypatch.setattr(gpus, "DRIVER_GPUS", tmp_path / "driver")


class Machine:
    """A machine whose GPUs a fake nvidia-smi lists, which is alone on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def says(self, listing: str, code: int = 0, before: str = "") -> Machine:
        program = f"#!{sys.executable} -IS\nimport sys, time\n{before}\nassert sys.argv[1:] == ['-L']\n"
        (self.folder / "nvidia-smi").write_text(f"{program}sys.stdout.write({listing!r})\nsys.exit({code})\n")
        (self.folder / "nvidia-smi").chmod(0o755)
        return self

    def visible(self, allowed: str | None = None) -> list[str]:
        environ = {"PATH": str(self.folder)}
        return visible(environ if allowed is None else {**environ, "CUDA_VISIBLE_DEVICES": allowed})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_driver_no_gpu_is_found(machine: Machine) -> None:
    assert machine.visible() == []


def test_nvidia_smi_on_the_path_counts_the_gpus(machine: Machine) -> None:
    assert machine.says(THREE).visible() == ["0", "1", "2"]


def test_a_gpu_cut_into_slices_is_used_by_its_slices(machine: Machine) -> None:
    assert machine.says(SLICED).visible() == [MIGS[0], MIGS[1], UUIDS[1], MIGS[2]]


def test_without_nvidia_smi_the_folder_of_the_driver_is_used(machine: Machine) -> None:
    for bus in ("0000:1b:00.0", "0000:43:00.0"):
        (gpus.DRIVER_GPUS / bus).mkdir(parents=True)
    assert machine.visible() == ["0", "1"]


def test_a_failing_nvidia_smi_is_ignored(machine: Machine) -> None:
    assert machine.says("NVIDIA-SMI has failed: GPU 0: x (UUID: GPU-1)\n", code=9).visible() == []


def test_a_hanging_nvidia_smi_does_not_hang_the_job(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NVIDIA_SMI_SECONDS", 0.2)
    assert machine.says(THREE, before="time.sleep(1000)").visible() == []


@pytest.mark.parametrize(
    ("allowed", "found"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        (" 1 , 2 ", ["1", "2"]),
        ("01,-1,1", ["1"]),
        ("1,seven,2", ["1"]),
        ("0,9999999999999999999999,1", ["0"]),
        ("1,2,1", []),
        (f"{UUIDS[2]},{MIGS[0]}", [UUIDS[2], MIGS[0]]),
        (f"{UUIDS[2]},{UUIDS[2]}", []),
        ("MIG-GPU-5d5ba0d6/1/0", ["MIG-GPU-5d5ba0d6/1/0"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(machine: Machine, allowed: str, found: list[str]) -> None:
    assert machine.says(THREE).visible(allowed) == found


def test_the_list_of_the_user_is_used_if_no_gpu_can_be_counted(machine: Machine) -> None:
    assert machine.visible("0,5") == ["0", "5"]


def test_a_job_without_gpus_does_not_query_the_driver(machine: Machine, tmp_path: Path) -> None:
    machine.says(THREE, before=f"open({str(tmp_path / 'asked')!r}, 'w')").visible("")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("nodes", "per_node", "shares"),
    [
        (2, 2, [["0", "1"], ["2", "3"]]),
        (3, 1, [["0"], ["1"], ["2"]]),
        (1, 4, [["0", "1", "2", "3"]]),
        (2, 0, [[], []]),
    ],
)
def test_no_two_nodes_share_a_gpu(nodes: int, per_node: int, shares: list[list[str]]) -> None:
    assert share(["0", "1", "2", "3"], nodes, per_node) == shares


def test_too_few_gpus_give_an_error_with_both_numbers_and_the_fix() -> None:
    with pytest.raises(TooFewGpusError) as caught:
        share(["0"], 2, 8)
    sentence = "the job requests 16 GPUs (2 nodes x 8), but this machine has 1 for it. Run it on the CPU with --cpu"
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("nodes", "gpus_each", "said"),
    [
        (1, 1, "--cpu: 1 GPU on each node is not used; 1 rank trains with gloo"),
        (2, 4, "--cpu: 4 GPUs on each node are not used; 8 ranks train with gloo"),
    ],
)
def test_gpus_that_a_cpu_run_leaves_unused_are_counted(nodes: int, gpus_each: int, said: str) -> None:
    wanted = job(container={"resources": {"limits": {"nvidia.com/gpu": str(gpus_each)}}}, nodes=nodes)
    assert run.on_this_machine(wanted, run.RunOptions(cpu=True))[1] == [said]
