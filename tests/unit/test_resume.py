"""The step from which a training resumes is shown in the line about a restart, at the end of a run, and in describe."""

import datetime as dt
import json
from typing import Any

import pytest
from msgspec.structs import replace
from worlds import START, World, digits

from ddpjob_cli.describe import ending
from ddpjob_cli.describe.job import describe
from ddpjob_cli.local.shown import failure_lines
from ddpjob_core.failures import Failure
from ddpjob_operator.failures import sentences
from ddpjob_operator.job import api
from ddpjob_operator.job.status import find_condition
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.observed.reports import AgentCounts, AgentReport
from ddpjob_operator.plan.actions import Settings

CLAIM: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "ckpt"}}


def trains(volume: dict[str, Any] | None = None, command: str = "torchrun", *, own_tmp: bool = False) -> World:
    """Return a job that saved step 500 and made step 520. volume: where it saved; None: in its container. own_tmp: True
    if /tmp is an emptyDir."""
    mounts = [] if volume is None else [{"name": "ckpt", "mountPath": "/ckpt"}]
    mounts += [{"name": "tmp", "mountPath": "/tmp"}] if own_tmp else []
    trainer = {"name": "trainer", "image": "x", "command": [command, "train.py"], "volumeMounts": mounts}
    volumes = [] if volume is None else [{"name": "ckpt", **volume}]
    volumes += [{"name": "tmp", "emptyDir": {}}] if own_tmp else []
    world = digits(template={"spec": {"containers": [trainer], "volumes": volumes}}).running()
    return world.reports_step(520, saved_step=500).settle()


def fails(world: World, place: int = 1) -> World:
    """Let a trainer fail and the group restart."""
    world.exits(place, code=3).settle().stops_all()
    world.step()
    return world


def test_a_restart_message_shows_the_step_from_which_it_resumes() -> None:
    world = trains(CLAIM)
    assert world.status.progress.saved_step == 500
    assert fails(world).status.message.endswith("restarting all 2 nodes: attempt 2, restart 1 of 3, from step 500")


@pytest.mark.parametrize(
    ("volume", "local", "where"),
    [
        (CLAIM, False, "from step 500"),
        (None, False, "last saved at step 500"),
        (None, True, "from step 500"),
        ({"emptyDir": {}}, False, "last saved at step 500"),
        ({"emptyDir": {}}, True, "last saved at step 500"),
        ({"hostPath": {"path": "/data"}}, True, "from step 500"),
    ],
)
@pytest.mark.parametrize("own_tmp", [False, True], ids=["", "an empty /tmp"])
def test_a_checkpoint_that_may_be_lost_with_its_pod_is_not_promised(volume, local, where, own_tmp):
    """A checkpoint that is lost with its pod, as in an emptyDir, must not be promised. An emptyDir at /tmp, for a
    read-only root, is only for temporary files."""
    world = trains(volume, own_tmp=own_tmp)
    world.settings = Settings(keeps_files=local)
    assert fails(world).status.message.endswith(f"restart 1 of 3, {where}")


def test_a_restart_of_a_script_without_checkpoints_shows_no_step() -> None:
    world = digits().running().reports_step(520).settle()
    assert fails(world).status.message.endswith("attempt 2, restart 1 of 3")


def test_an_attempt_that_failed_before_its_first_step_shows_the_step_from_which_it_had_resumed() -> None:
    world = digits().running().reports_step(0, phase="start")
    world.reports_step(1125, phase="start", resumed_step=1125, saved_step=1125).settle()
    assert world.status.progress is None, "no step was made"
    assert world.status.furthest_step is None, "a step that was loaded is no progress of this job"
    assert fails(world).status.message.endswith("restart 1 of 3, last saved at step 1125")
    assert world.status.resumed_step is None, "the next attempt has loaded nothing yet"


def test_for_a_replaced_pod_only_the_last_checkpoint_is_named() -> None:
    """The other pods may have a later step in memory, so the checkpoint's step must not be promised."""
    world = trains(command="ddprun").deleted_first(1).settle()
    message = world.stops(1).settle().status.message
    world.settle()
    texts = [message, *(event.message for event in world.events)]
    assert any(
        "takes its place, the other node waits" in text and text.endswith(", last saved at step 500") for text in texts
    )


def test_a_restart_in_place_resumes_from_the_checkpoint() -> None:
    world = trains(command="ddprun")
    failure = Failure(
        rank=1, node_rank=1, exit_code=3, exception="OSError: x", step=520, failure_class="application",
        charged_to="application",
    )  # fmt: skip
    counts = AgentCounts(application=1, in_a_row=1, charged_in_a_row=1)
    world.agent = AgentReport(generation=1, restarts=counts, failures=[failure.as_dict()])
    world.settle()
    assert world.events[-1].message.endswith("restarted all ranks in place (restart 1), from step 500")


def test_describe_and_the_final_message_show_that_a_job_resumed() -> None:
    """The final message must show that the job resumed: a run of a complete training ends after seconds."""
    world = digits().running().reports_step(1125, phase="start", resumed_step=1125, final=True).settle()
    assert "Progress:   resumed at step 1125" in describe(world.job, None, world.now)
    world.exits(0).exits(1).settle()
    assert ending.succeeded("digits", world.status, 8) == "✔ digits Succeeded in 8s   resumed at step 1125"
    restarted = replace(world.status, restarts=api.Restarts(application=1, total=1))
    assert ending.succeeded("digits", restarted, 8) == "✔ digits Succeeded in 8s   1 restart   resumed at step 1125"


MEMORY = "the memory on the nodes of ranks 0, 1"


def in_place(step: int, *, in_memory: int = 0) -> AgentReport:
    """Return the report of node 0's agent after a rank was killed at this step and all were restarted."""
    failure = Failure(
        rank=1, node_rank=1, exit_code=137, step=step, failure_class="application", charged_to="application"
    )
    counts = AgentCounts(application=1, in_a_row=1, charged_in_a_row=1)
    return AgentReport(generation=1, step_in_memory=in_memory, restarts=counts, failures=[failure.as_dict()])


def test_a_restart_from_memory_repeats_no_step_and_every_line_shows_it() -> None:
    world = trains(command="ddprun").after(3)
    world.agent = in_place(534, in_memory=534)
    world.settle()
    assert world.events[-1].message.endswith("restarted all ranks in place (restart 1); step 534 is in memory")
    resumed: dict[str, Any] = {"resumed_step": 534, "resumed_from": MEMORY, "generation": 1, "saved_step": 500}
    world.after(1).reports_step(534, phase="start", **resumed).settle().after(1).reports_step(537, **resumed).settle()
    assert (world.status.resumed_step, world.status.resumed_from) == (534, MEMORY)
    assert world.status.goodput.lost_steps == 0
    assert any(f"resumed at step 534 from {MEMORY}" in line for line in describe(world.job, None, world.now))
    end = ending.succeeded("digits", world.status, 8)
    assert end == f"✔ digits Succeeded in 8s   1 restart, no step repeated   resumed at step 534 from {MEMORY}"


@pytest.mark.parametrize("where", ["/ckpt", "a copy in the memory on the node of rank 0"])
def test_no_message_claims_unrepeated_steps_after_a_restart_from_an_older_state(where: str) -> None:
    """After a restart from an older state no message may claim "no step repeated": later steps may be unreported."""
    world = trains(command="ddprun").after(3)
    world.agent = in_place(534)
    world.settle()
    resumed: dict[str, Any] = {"resumed_step": 534, "resumed_from": where, "generation": 1, "saved_step": 534}
    world.after(1).reports_step(560, **resumed).settle()
    assert ending.succeeded("digits", world.status, 8) == (
        f"✔ digits Succeeded in 8s   1 restart   resumed at step 534 from {where}"
    )


@pytest.mark.parametrize("first", [501, 560], ids=["its first step is heard of", "a step after the last one is"])
def test_a_restart_from_the_folder_also_repeats_steps_that_were_never_reported(first: int) -> None:
    """A restart from the folder must also count steps that were made after the last report as repeated."""
    world = trains(command="ddprun").after(3)
    world.agent = in_place(534)
    world.settle()
    resumed: dict[str, Any] = {"resumed_step": 500, "resumed_from": "/ckpt", "generation": 1, "saved_step": 500}
    world.after(1).reports_step(first, **resumed).settle().after(9).reports_step(580, **resumed).settle()
    assert world.status.goodput.lost_steps == 34
    end = ending.succeeded("digits", world.status, 8)
    assert end == "✔ digits Succeeded in 8s   1 restart, 34 steps repeated   resumed at step 500 from /ckpt"


def test_a_failure_reported_after_the_next_ranks_have_started_counts_its_steps_once() -> None:
    world = trains(command="ddprun").after(3)
    resumed: dict[str, Any] = {"resumed_step": 500, "resumed_from": "/ckpt", "saved_step": 500}
    world.reports_step(501, generation=1, **resumed).settle()
    agent = in_place(534)
    world.agent = replace(agent, failures=[failure._replace(generation=0) for failure in agent.failures])
    world.settle().after(1).reports_step(501, generation=2, **resumed).settle()
    assert world.status.goodput.lost_steps == 20 + 1, "of generation 0, and of generation 1"


def test_a_state_loaded_at_the_beginning_counts_no_step_as_kept() -> None:
    """A state loaded at the beginning, such as another training's step 50,000, must not reduce the lost steps."""
    loaded: dict[str, Any] = {"resumed_step": 50_000, "resumed_from": "/pretrained"}
    world = digits(container={"command": ["ddprun", "train.py"]}).running().reports_step(20, **loaded).settle().after(3)
    world.agent = in_place(20)
    world.settle().after(1).reports_step(1, generation=1, **loaded).settle()
    assert world.status.goodput.lost_steps == 20


def test_ranks_that_start_from_scratch_in_their_pods_do_not_show_an_earlier_resume() -> None:
    world = trains(command="ddprun").after(3)
    resumed: dict[str, Any] = {"resumed_step": 534, "resumed_from": MEMORY, "generation": 1}
    world.reports_step(535, **resumed).settle().after(3).reports_step(540, **resumed).settle()
    assert world.status.resumed_from == MEMORY
    world.after(3).reports_step(1, generation=2).settle()
    assert (world.status.resumed_step, world.status.resumed_from) == (None, "")
    assert "resumed" not in ending.succeeded("digits", world.status, 8)


def test_a_new_attempt_does_not_show_the_resume_of_the_last_one() -> None:
    """The ranks of a new attempt have not loaded a state yet, so no resume may be shown."""
    world = trains(CLAIM).reports_step(530, resumed_step=500, resumed_from="/ckpt", not_kept="no room").settle()
    assert (world.status.resumed_from, world.status.not_kept) == ("/ckpt", "in pod digits-1-0: no room")
    fails(world)
    assert (world.status.resumed_from, world.status.not_kept) == ("", "")


def test_a_memory_limit_that_is_too_small_is_named_with_the_field_and_the_size() -> None:
    """A memory limit that is too small must be named with field and size: it makes the job repeat steps."""
    world = trains(command="ddprun")
    why = "the container's memory limit is 600 MiB, 590 MiB are in use, and 110 MiB are needed"
    world.reports_step(523, not_kept=why, limit_needed=734_003_201).settle()
    told = f"in pod digits-1-0: {why}; set spec.template.spec.containers[0].resources.limits.memory to 701Mi or more"
    assert world.status.not_kept == told
    assert [e.message for e in world.events if e.reason == "NotKeptInMemory"] == [
        f"the state is not kept in memory: {told}"
    ]
    assert any(line == f"In memory:  no: {told}" for line in describe(world.job, None, world.now))
    world.reports_step(524, not_kept=why, limit_needed=734_003_201).settle().reports_step(525).settle()
    assert world.status.not_kept == ""
    assert len([e for e in world.events if e.reason == "NotKeptInMemory"]) == 1, "it is said once"


FULL = "the state of step 550 was not saved: disk full: No space left on device (errno 28), in /ckpt; the newest …"


def test_a_failed_save_is_a_warning_a_condition_and_a_line_until_a_later_save_succeeds() -> None:
    """A failed save must be shown until a later one succeeds: a job may continue from memory without a new snapshot."""
    world = trains(CLAIM).reports_step(552, saved_step=500, save_failed=FULL).settle()
    status = world.status
    assert (status.state, status.save_failed, status.progress and status.progress.saved_step) == ("Running", FULL, 500)
    assert [(e.type, e.message) for e in world.events if e.reason == "SaveFailed"] == [("Warning", FULL)]
    condition = find_condition(status, "SaveFailed")
    assert (condition.status, condition.reason, condition.message) == ("True", "SaveFailed", FULL)
    assert any(line == f"Saves:      fail: {FULL}" for line in describe(world.job, None, world.now))
    world.reports_step(602, saved_step=500, save_failed=FULL.replace("550", "600")).settle()
    assert world.status.save_failed == FULL.replace("550", "600")
    assert len([e for e in world.events if e.reason == "SaveFailed"]) == 1, "a disk that stays full is one event"
    world.reports_step(652, saved_step=650).settle()
    condition = find_condition(world.status, "SaveFailed")
    assert (world.status.save_failed, condition and condition.status) == ("", "False")


@pytest.mark.parametrize("last", ["", FULL])
def test_a_success_whose_last_save_failed_gets_a_warning(last: str) -> None:
    """A success whose last save failed must get a warning, for example after `os._exit(0)`, which skips the save."""
    world = trains(CLAIM).reports_step(552, saved_step=500, save_failed=FULL).settle()
    world.reports_step(602, saved_step=500, save_failed=last).settle().exits(0, 0).exits(1, 0).settle()
    assert world.status.state == "Succeeded"
    assert [one.message for one in world.status.findings] == [last] * bool(last)
    assert ("suspicious: the state of step 550 was not" in ending.of_job(world.job)) is bool(last)


def test_a_new_attempt_does_not_show_failed_saves_of_the_last_one() -> None:
    world = trains(CLAIM).reports_step(552, save_failed=FULL).settle()
    fails(world)
    assert world.status.save_failed == ""


def test_a_pod_without_enough_memory_is_named_even_if_it_does_not_run_rank_0() -> None:
    """A pod without enough memory must be named even without rank 0: if others are lost, the job loses steps."""
    world = trains(command="ddprun")
    world.reports_step(523, rank=1, node_rank=1, not_kept="no room", limit_needed=734_003_201)
    world.reports_step(523).settle()
    told = "in pod digits-1-1: no room; set spec.template.spec.containers[0].resources.limits.memory to 701Mi or more"
    assert world.status.not_kept == told
    world.reports_step(524, not_kept="no room", limit_needed=944_003_201).settle()
    assert world.status.not_kept.startswith("in pod digits-1-0 and 1 more: no room; set "), "both, and the larger limit"
    assert world.status.not_kept.endswith(" to 901Mi or more")


def test_memory_reports_of_ranks_before_a_restart_are_dropped() -> None:
    """Reports about memory from before a restart must be dropped, or a pod with enough room is named for ever."""
    world = trains(command="ddprun").reports_step(523, rank=1, node_rank=1, not_kept="no room")
    world.reports_step(524, generation=1, resumed_step=523, resumed_from="the memory").settle()
    assert world.status.not_kept == ""


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (281, "■ digits stopped after 12s, saved at step 281"),
        (250, "■ digits stopped after 12s at step 281, last saved at step 250"),
        (None, "■ digits stopped after 12s at step 281"),
    ],
)
def test_a_stopped_run_shows_what_was_saved(saved: int | None, said: str) -> None:
    """After Ctrl-C the output must show which step was saved."""
    progress = api.Progress(step=281, saved_step=saved, updated=START + dt.timedelta(seconds=12))
    assert failure_lines.stopped("digits", api.Status(progress=progress), 12) == said
    assert failure_lines.stopped("digits", api.Status(), 12) == "■ digits stopped after 12s"


TORCHRUN_KILLED = (
    "W1129 14:49:27.115 12 torch/distributed/elastic/multiprocessing/api.py:1048] Unable to shutdown process 21 via "
    "15, forcefully exiting via 9\n"
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15"
)
WORKER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated. "


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"rank": 0, "exitCode": 1, "exception": WORKER, "where": "train.py:40"}], WORKER[:-2] + " in train.py:40"),
        ([{"rank": 1, "exitCode": 75, "resumable": True}, {"rank": 0, "exitCode": 1, "exception": "E: a"}], "E: a"),
        ([{"rank": 0, "exitCode": 1, "exception": f"ddpjob.errors.SnapshotError: {FULL}"}], f"SnapshotError: {FULL}"),
    ],
)
def test_a_stop_that_saved_nothing_shows_why(messages: list[dict[str, Any]], why: str) -> None:
    progress = api.Progress(step=281, saved_step=250, updated=START)
    ended = [Container("ended", message=json.dumps({"ddpjob": 1, "time": 1.0, **m}), exit_code=1) for m in messages]
    said = failure_lines.stopped("digits", api.Status(progress=progress), 12, ended)
    assert said.startswith("■ digits stopped after 12s at step 281, last saved at step 250; nothing was saved: rank 0 ")
    assert said.endswith(why.rstrip(" ."))


@pytest.mark.parametrize(
    ("exit_code", "log", "more"),
    [
        (143, "", ""),
        (137, "", "; nothing was saved: it had to be killed by SIGKILL"),
        (1, TORCHRUN_KILLED, "; nothing was saved: it had to be killed by SIGKILL"),
        (1, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15", ""),
        (1, "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", ""),
    ],
)
def test_an_error_that_the_stop_itself_causes_is_not_given_as_the_reason(exit_code: int, log: str, more: str) -> None:
    progress = api.Progress(step=281, updated=START)
    ended = [Container("ended", message=log, exit_code=exit_code)]
    told_so = failure_lines.stopped("digits", api.Status(progress=progress), 12, ended)
    assert told_so == f"■ digits stopped after 12s at step 281{more}"


def test_a_stop_whose_save_failed_shows_it_even_if_no_rank_raised() -> None:
    status = api.Status(progress=api.Progress(step=281, saved_step=100, updated=START), save_failed=FULL)
    assert failure_lines.stopped("d", status, 12).endswith(f"last saved at step 100; {FULL}")


@pytest.mark.parametrize("said", ["[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534", "No room"])
def test_an_incomplete_write_of_torch_is_explained_as_a_full_disk(said: str) -> None:
    """torch's error about an incomplete write must be explained as a full disk, which it does not mention."""
    failure = api.JobFailure(attempt=1, rank=0, node_rank=0, time=START, exit_code=1, exception=f"RuntimeError: {said}")
    assert ("most likely a full disk: RuntimeError" in sentences.sentence(failure)) is ("pos" in said)
