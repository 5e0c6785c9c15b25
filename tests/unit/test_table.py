"""Lines of the table at the bottom of the terminal during a local run, at three widths."""

import datetime as dt
import io
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from worlds import START, job

from ddpjob_cli.describe import figures
from ddpjob_cli.local.run_files.history import History
from ddpjob_cli.local.shown import table
from ddpjob_cli.local.shown.table import NodeRow, RunMoment, Usage
from ddpjob_operator.job import api

NODES = (
    NodeRow(0, "rank 0", "Running", 312, (4312,), Usage(98.4, 1_230_000_000, 87.0, 12_300_000_000)),
    NodeRow(1, "rank 1", "Running", None, (4313,), Usage(7.0, 350_000_000, 3.0, 900_000_000)),
)
FAILURE = api.FailureLine(
    attempt=1, message="rank 1 (node 1) was killed by SIGKILL at step 200", time=START + dt.timedelta(seconds=20)
)


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def progress(step: int, seconds: float, attempt: int = 1, **others: Any) -> api.Progress:
    metrics = {"loss": "0.48397613525390626", "learning_rate": "1.220703125e-06"}
    known: dict[str, Any] = {"total_steps": 1125, "percent": 100 * step // 1125, "eta_seconds": 24}
    known |= {"samples_per_second": 5210.4, "metrics": metrics} | others
    return api.Progress(step=step, attempt=attempt, updated=at(seconds), **known)


def status(state: Any = "Running", **others: Any) -> api.Status:
    known: dict[str, Any] = {"attempt": 1, "attempt_time": START, "running_time": at(1), "state_time": at(1)}
    return api.Status(state=state, **(known | others))


RESTARTED = {
    "attempt": 2,
    "attempt_time": at(21),
    "running_time": at(22),
    "state_time": at(22),
    "furthest_step": 200,
    "failures": [FAILURE],
    "restarts": api.Restarts(application=1, total=1),
}


def moment(what: api.Status, seconds: float, history: History | None = None, **others: Any) -> RunMoment:
    return RunMoment(replace(job(), status=what), history or History(), START, at(seconds), **others)


def text(what: RunMoment, width: int, height: int = 22, nodes: tuple[NodeRow, ...] = NODES) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as shown:
        console.print(table.view(what, nodes, width, height))
    return [line.rstrip() for line in shown.get().splitlines()]


def trained(losses: int = 40, slow_from: int = 1000) -> tuple[api.Status, History]:
    """Return a run with a falling loss and a step per second. Steps after slow_from take two seconds."""
    history, what, seconds = History(), status(), 2.0
    for step in range(1, losses + 1):
        seconds += 2 if step > slow_from else 1
        loss = f"{1 / step:.6f}"
        what = status(progress=progress(step, seconds, metrics={"loss": loss}), first_step_time=at(3))
        history.take(what, START, at(seconds))
    return what, history


def test_at_120_columns_each_rank_has_its_step_process_and_use_of_cpu_and_gpu() -> None:
    assert text(moment(status(progress=progress(312, 40)), 41), 120) == [
        "Running  step 312/1125  27 %  24s left  attempt 1  elapsed 41s",
        "5,210 samples/s  loss 0.484  learning_rate 1.22e-06",
        "━" * 32 + "─" * 88,
        "  node 0  rank 0  Running  step 312  pid 4312  CPU  98 %  1.2 GB  GPU  87 % 12 GB",
        "  node 1  rank 1  Running            pid 4313  CPU   7 %  350 MB  GPU   3 % 900 MB",
    ]


def test_at_80_columns_the_least_important_figures_are_omitted() -> None:
    """At 80 columns figures must be left out, and no line be cut in the middle of a number."""
    lines = text(moment(status(progress=progress(312, 40)), 41), 80)
    assert lines[0] == "Running  step 312/1125  27 %  24s left  attempt 1  elapsed 41s"
    assert lines[3] == "  node 0  rank 0  Running  step 312  pid 4312  CPU  98 %  1.2 GB"


def test_at_40_columns_lines_are_wrapped_and_processes_omitted() -> None:
    """At 40 columns lines must be wrapped, and show the state, the step and the time left."""
    assert text(moment(status(progress=progress(312, 40)), 41), 40) == [
        "Running  step 312/1125  27 %  24s left",
        "attempt 1  elapsed 41s",
        "5,210 samples/s  loss 0.484",
        "learning_rate 1.22e-06",
        "━" * 10 + "─" * 30,
        "  node 0  rank 0  Running  step 312",
        "  node 1  rank 1  Running",
    ]


@pytest.mark.parametrize(
    ("what", "seconds", "initialized", "head"),
    [
        (status("Starting"), 4, None, "Starting  attempt 1: starting the nodes, 3s  elapsed 4s"),
        (status(), 7, None, "Starting  attempt 1: importing, 6s  elapsed 7s"),
        (status(), 20, at(8), "Starting  attempt 1: waiting for the first step, 12s  elapsed 20s"),
        (status(), 71, None, "Running  attempt 1  elapsed 1m11s"),
        (status("Pending", message="backing off"), 5, None, "Pending  attempt 1: backing off, 4s  elapsed 5s"),
    ],
)
def test_while_nothing_trains_the_table_shows_what_it_waits_for_and_since_when(what, seconds, initialized, head):
    """Each wait must show its reason and its time. Users press Ctrl-C if a line does not change for 19 s."""
    assert text(moment(what, seconds, initialized=initialized), 120)[0] == head


def test_a_script_that_cannot_report_is_not_shown_as_importing() -> None:
    assert table.summary(moment(status(), 11, reports=False)) == "Running, attempt 1: elapsed 11s"


def test_after_a_minute_a_script_without_steps_gets_the_hint_how_to_report_them() -> None:
    """The hint how to report steps must come only after a minute: users of plain scripts would search for a fault."""
    assert table.hint(moment(status(), 31, reports=False)) == ""
    assert "ddpjob.progress(step=i)" in table.hint(moment(status(), 71, reports=False))
    assert text(moment(status(), 71, reports=False), 120, nodes=())[-1] == table.NO_STEPS
    assert table.hint(moment(status(progress=progress(312, 40)), 71)) == ""
    assert table.hint(moment(status("Pending", message="backing off"), 71)) == ""


def test_the_first_step_after_a_restart_does_not_show_the_pace_of_the_old_ranks() -> None:
    """The first step after a restart must not have the pace of the old ranks, such as 113 ms/step."""
    _, history = trained()
    what = status(progress=progress(1, 50, attempt=2), **RESTARTED | {"attempt_time": at(45), "running_time": at(46)})
    history.take(what, START, at(50))
    assert "/step" not in text(moment(what, 51, history), 120)[1]
    later = replace(what, progress=progress(2, 51, attempt=2))
    history.take(later, START, at(51))
    assert text(moment(later, 52, history), 120)[1].startswith("1 s/step  ")


def test_a_lower_step_has_no_pace_of_the_ranks_before_a_restart_that_is_not_reported_yet() -> None:
    """A lower step must have no pace of the old ranks: it may arrive before the report about the restart."""
    what, history = trained()
    what = replace(what, progress=progress(1, 50))
    history.take(what, START, at(50))
    assert "/step" not in text(moment(what, 51, history), 120)[1]


def test_in_plain_output_a_wait_is_shown_as_well() -> None:
    """Plain output must show a wait, too: a CI log that is silent for 19 s looks like a hang."""
    assert table.summary(moment(status(), 11)) == "Starting, attempt 1: importing, 10s"
    assert table.summary(moment(status(progress=progress(312, 40)), 41)) == (
        "Running  step 312/1125  27 %  24s left  5,210 samples/s  loss 0.484  learning_rate 1.22e-06"
    )


def test_after_a_restart_no_figure_of_the_previous_attempt_is_shown() -> None:
    """After a restart no figure of the previous attempt, such as "5s left", may be shown."""
    before = status(progress=progress(200, 19), **RESTARTED)
    lines = text(moment(before, 28), 120)
    assert lines[0] == "Starting  attempt 2: importing, 6s  1 restart  elapsed 28s"
    assert not any("samples/s" in line or "loss" in line or "━" in line for line in lines)
    after = status(progress=progress(181, 30, attempt=2), **RESTARTED)
    assert text(moment(after, 31), 120)[0].startswith("Running  step 181/1125")


def test_after_a_restart_in_place_no_figure_of_the_previous_generation_is_shown() -> None:
    what = status(progress=progress(200, 19), failures=[FAILURE], furthest_step=200)
    assert text(moment(what, 26), 120)[0] == "Starting  attempt 1: importing, 6s  elapsed 26s"


def test_the_last_failure_stays_visible() -> None:
    """The last failure must stay visible next to "1 restart", because its line has scrolled away."""
    lines = text(moment(status(progress=progress(900, 90, attempt=2), **RESTARTED), 91), 60)
    assert lines[-2:] == ["✖ attempt 1: rank 1 (node 1) was killed by SIGKILL at step", "200"]


def test_a_failure_is_shown_when_its_cause_is_settled() -> None:
    """A failure must be shown when its cause is settled, so that no rank that was only stopped is named."""
    stopped = replace(FAILURE, attempt=2, message="rank 0 (node 0) stopped in order")
    first = api.JobFailure(attempt=2, node_rank=0, reason="Error", time=at(90))
    broken = RESTARTED | {"failures": [FAILURE, stopped], "last_failure": first}
    for failure, shown in (
        (first, "✖ attempt 1: rank 1"),
        (replace(first, failure_class="application"), "✖ attempt 2"),
    ):
        lines = text(moment(status("Restarting", **(broken | {"last_failure": failure})), 91), 60)
        assert [line.startswith(shown) for line in lines if "✖" in line] == [True]


def test_a_narrow_terminal_shows_the_cause_of_a_failure_too() -> None:
    """A narrow terminal must show the cause of a failure, which follows `rank 1 (node 1) ended wi…`."""
    why = "rank 1 (node 1) ended with exit code 1 in train.py:41 (ValueError: no such shard: 7)"
    failed = RESTARTED | {"failures": [replace(FAILURE, message=why)]}
    lines = text(moment(status(progress=progress(900, 90, attempt=2), **failed), 91), 40)
    assert lines[-3:] == [
        "✖ attempt 1: rank 1 (node 1) ended with",
        "exit code 1 in train.py:41 (ValueError:",
        "no such shard: 7)",
    ]


def test_the_loss_has_a_curve_of_20_characters() -> None:
    """The loss must have a curve, so that users see without another tool if the model learns."""
    line = text(moment(*_shown(trained())), 120)[1]
    assert line.startswith("1 s/step  5,210 samples/s  loss 0.025 █")
    assert len(line.split()[-1]) == 20
    assert sorted(line.split()[-1], reverse=True) == list(line.split()[-1]), "it falls"


def test_a_step_that_takes_longer_than_before_is_shown_as_slow() -> None:
    """The table must show that steps take longer, for example because of a hot GPU or a full disk."""
    line = text(moment(*_shown(trained(losses=60, slow_from=45))), 120)[1]
    assert re.match(r"2 s/step, \d\d % slower  ", line)
    assert "slower" not in text(moment(*_shown(trained(losses=60))), 120)[1]


def _shown(run: tuple[api.Status, History]) -> tuple[api.Status, float, History]:
    return run[0], 90, run[1]


def test_only_as_many_of_forty_nodes_are_shown_as_fit() -> None:
    """Only as many nodes as fit may be shown, so that the lines with the state stay on the screen."""
    many = tuple(NodeRow(i, f"rank {i}", "Running") for i in range(40))
    lines = text(moment(status(progress=progress(312, 40)), 41), 80, 22, many)
    assert len(lines) == 3 + 17
    assert lines[-1] == "  and 24 nodes more"
    assert len(text(moment(status(progress=progress(312, 40)), 41), 80, 8, many)) <= 8


WORDS = st.text(max_size=12)


@given(st.integers(2, 130), st.dictionaries(WORDS, WORDS, max_size=5), WORDS)
def test_no_line_is_wider_than_the_terminal_or_controlled_by_a_script(width, metrics, message):
    """A metric's name or a message must not move the cursor or wrap a line, or the table moves up the screen."""
    failure = replace(FAILURE, message=message)
    what = status(progress=progress(312, 40, metrics=metrics), failures=[failure])
    lines = text(moment(what, 41), width)
    assert all(cell_len(line) <= width for line in lines)
    assert not any(unicodedata.category(character) == "Cc" for line in lines for character in line)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("0.48397613525390626", "0.484"),
        ("1.220703125e-06", "1.22e-06"),
        ("0.988796", "0.989"),
        ("0.99961", "0.9996"),
        ("1.0", "1"),
        ("12345.678", "12,346"),
        ("312", "312"),
        ("nan", "nan"),
        ("fa68aa27b5bf", "fa68aa27b5bf"),
        ("123456789e01", "123456789e01"),
        ("v1.2.3", "v1.2.3"),
    ],
)
def test_metrics_are_rounded_and_values_that_are_no_fraction_are_kept(raw: str, shown: str) -> None:
    """Users do not need 17 digits of a loss. A hash must not be read as a number."""
    assert figures.metric(raw) == shown


def test_sizes_and_step_times_have_a_unit() -> None:
    """Step times need a unit: users must not mistake milliseconds for seconds."""
    assert [figures.size(n) for n in (0, 999, 1500, 350e6, 1.23e9, 81e9)] == [
        "0 B",
        "999 B",
        "1.5 KB",
        "350 MB",
        "1.2 GB",
        "81 GB",
    ]
    assert [figures.step_time(s) for s in (0.004, 0.21, 2.14, 75)] == [
        "4 ms/step",
        "210 ms/step",
        "2.14 s/step",
        "75 s/step",
    ]
