"""Injected faults happen exactly as DDPJOB_FAULTS says, and a value that cannot be read has no effect."""

import json
import signal
from collections.abc import Callable

import pytest

TRAIN = """
import ddpjob
for step in range(1, 7, 2):
    ddpjob.progress(step, total=6)
    print(step, flush=True)
"""


@pytest.fixture
def train(start_script) -> Callable[..., tuple[list[str], int, str]]:
    """Return a function that runs a training with steps 1, 3 and 5: it returns the steps, the exit code and stderr."""

    def run(faults: object, **environ: object) -> tuple[list[str], int, str]:
        text = faults if isinstance(faults, str) else json.dumps(faults)
        process = start_script(TRAIN, DDPJOB_FAULTS=text, **environ)
        out, err = process.communicate(timeout=30)
        return out.split(), process.returncode, err

    return run


def test_a_rank_is_killed_or_exits_at_the_step_of_its_fault(train):
    assert train([{"rank": 0, "step": 3, "signal": "SEGV"}])[:2] == (["1"], -signal.SIGSEGV)
    assert train([{"rank": 0, "step": 3, "signal": "SIGKILL"}])[:2] == (["1"], -signal.SIGKILL)
    assert train([{"rank": 0, "step": 3, "exit": 3}])[:2] == (["1"], 3)


def test_a_fault_at_an_unreported_step_happens_at_the_next_reported_one(train):
    assert train([{"rank": 0, "step": 4, "exit": 3}])[:2] == (["1", "3"], 3)


def test_a_fault_of_another_rank_or_attempt_has_no_effect(train):
    three = {"rank": 3, "step": 3, "exit": 3}
    assert train([three])[:2] == (["1", "3", "5"], 0)
    assert train([three], RANK=3, WORLD_SIZE=4)[1] == 3
    assert train([three], RANK=3, WORLD_SIZE=4, DDPJOB_ATTEMPT=2)[1] == 0, "the attempt after the fault must succeed"
    assert train([{**three, "attempt": 2}], RANK=3, WORLD_SIZE=4, DDPJOB_ATTEMPT=2)[1] == 3


def test_a_fault_belongs_to_one_generation_and_by_default_to_the_first(train):
    fault = {"rank": 0, "step": 3, "exit": 3}
    again = {"DDPJOB_GENERATION": 1, "TORCHELASTIC_RESTART_COUNT": 1}
    assert train([fault], DDPJOB_GENERATION=0)[1] == 3
    assert train([fault], **again)[1] == 0, "the ranks that start again in the pod must succeed"
    assert train([fault], TORCHELASTIC_RESTART_COUNT=1)[1] == 0, "torchrun's own restarts too"
    assert train([{**fault, "generation": 1}], **again)[1] == 3


def test_a_recorded_fault_happens_once_in_any_attempt_and_generation(train, tmp_path):
    faults = [
        {"rank": 0, "step": 3, "exit": 3},
        {"rank": 0, "step": 3, "exit": 4},
        {"rank": 0, "step": 5, "exit": 5, "attempt": 2},
    ]
    records = tmp_path / "records"
    records.mkdir()
    later = {"DDPJOB_FAULTS_HAPPENED": records, "DDPJOB_ATTEMPT": 2, "DDPJOB_GENERATION": 3}
    assert [train(faults, **later)[1] for _ in range(4)] == [3, 4, 5, 0]
    assert sorted(file.name for file in records.iterdir()) == ["0", "1", "2"]
    nowhere = {**later, "DDPJOB_FAULTS_HAPPENED": tmp_path / "gone"}
    assert train(faults, **nowhere)[1] == 0, "it would happen again after each restart"


def test_a_hanging_rank_keeps_reporting_and_makes_no_step(receiver, start_script):
    hang = json.dumps([{"rank": 0, "step": 3, "hang": True}])
    process = start_script(TRAIN, DDPJOB_FAULTS=hang, DDPJOB_STATUS_URL=receiver.url, DDPJOB_STATUS_INTERVAL="0.02")
    while receiver.next()["step"] < 3:
        pass
    assert [receiver.next()["step"] for _ in range(20)] == [3] * 20
    assert process.poll() is None


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense",
        "{",
        {"rank": 0},
        7,
        [{"rank": 0, "step": 3}],
        [{"rank": 0, "step": 3, "signal": "NONE"}],
        [{"rank": 0, "step": 3, "signal": 9}],
        [{"rank": 0, "step": 3, "exit": 256}],
        [{"rank": 0, "step": 3, "exit": True}],
        [{"rank": 0, "step": 3, "hang": False}],
        [{"rank": 0, "step": 3, "explode": 1}],
        [{"rank": 0, "step": 3, "exit": 3, "hang": True}],
        [{"step": 3, "exit": 3}],
        [{"rank": 0, "step": "soon", "exit": 3}],
        [None, [], "x"],
    ],
)
def test_an_invalid_fault_is_reported_once_and_ignored(train, wrong):
    steps, code, said = train(wrong)
    assert (steps, code) == (["1", "3", "5"], 0)
    assert said.count("ddpjob: DDPJOB_FAULTS: ") == len(said.splitlines()) == 1, said


def test_one_invalid_fault_does_not_hide_a_valid_one(train):
    assert train([{"rank": 0, "step": 3, "explode": 1}, {"rank": 0, "step": 5, "exit": 4}])[1] == 4
