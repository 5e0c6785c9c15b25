"""The command line equals torchrun's; an option that ddprun does not support is refused by name."""

import os
from typing import Any

import pytest

from ddpjob_core.budget import Grant
from ddprun.options import Options, parse


def options(line: str, **environ: str) -> Options:
    return parse(line.split(), environ)


def refusal(capsys: Any, line: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as ended:
        options(line, **environ)
    assert ended.value.code == 2
    return str(capsys.readouterr().err)


@pytest.mark.parametrize(
    "line",
    ["--nproc-per-node 3", "--nproc_per_node=3", "--nproc 3", "--nproc-per 3", "--nproc_per=3", "--np 3"],
)
def test_every_option_spelling_of_torchrun_is_accepted(line: str) -> None:
    assert options(f"{line} train.py").nproc == 3


def test_an_ambiguous_abbreviation_is_refused_with_both_options(capsys: Any) -> None:
    assert "ambiguous option: --master could match --master-addr, --master-port" in refusal(
        capsys, "--master x train.py"
    )
    assert "ambiguous option: --log=5 could match --log-dir, --logs-specs" in refusal(capsys, "--log=5 train.py")


def test_words_after_the_script_belong_to_the_script() -> None:
    found = options("--nnodes 1 train.py --nnodes 7 -m -- --tee 3 --preload x")
    assert found.script.name == "train.py"
    assert found.script.args == ("--nnodes", "7", "-m", "--", "--tee", "3", "--preload", "x")
    assert found.script.kind == "script"


@pytest.mark.parametrize(
    "words", ["--log 5 --mo=2 --no --r", "--tee 3 --log 5 -- --rdzv", "--m -- x", "x --no=1 --dup"]
)
def test_a_script_argument_that_resembles_options_belongs_to_the_script(words: str) -> None:
    """`--log` of a script must not count as an abbreviated option of ddprun."""
    for begin in ("", "-m ", "--tee 3 --role r ", "-- "):
        assert options(f"{begin}train {words}").script.args == tuple(words.split())
    assert options(f"train -- {words}").script.args == tuple(words.split()), "as torchrun, which takes it away"


def test_variables_count_if_the_command_line_does_not_set_the_option() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "uid-1",
               "PET_MASTER_ADDR": "job-0.job.ns", "PET_MASTER_PORT": "23001", "PET_SHUTDOWN_TIMEOUT": "25"}  # fmt: skip
    found = options("train.py", **environ)
    assert (found.places, found.place, found.nproc) == ((0, 1), 1, 4)
    assert (found.host, found.port, found.run_id, found.shutdown_seconds) == ("job-0.job.ns", 23001, "uid-1", 25.0)
    assert options("--node-rank 0 --nproc 1 train.py", **environ).place == 0


@pytest.mark.parametrize("flag", ["", "0", "1"])
def test_a_flag_may_be_set_by_a_variable(flag: str) -> None:
    assert options("pkg", PET_MODULE=flag).script.kind == ("module" if flag == "1" else "script")


@pytest.mark.parametrize("text", ["false", "False", "no", "true"])
def test_a_flag_that_is_neither_0_nor_1_is_refused_with_its_name(capsys: Any, text: str) -> None:
    """A flag such as PET_STANDALONE=false must be refused with its name: as true, each node would train alone."""
    told = refusal(capsys, "--nnodes 2 --node-rank 0 train.py", PET_STANDALONE=text)
    assert f"PET_STANDALONE: {text!r} is neither 0 nor 1" in told


@pytest.mark.parametrize(
    ("line", "environ", "budget"),
    [
        ("", {}, (3, 3, 3)),
        ("--max-restarts 1", {}, (1, 1, 1)),
        ("", {"PET_MAX_RESTARTS": "0"}, (0, 0, 0)),
        ("", {"PET_MAX_RESTARTS": "0", "DDPJOB_RESTARTS_LEFT": "LEFT"}, (2, 99, 10)),
        ("--max-restarts 1", {"PET_MAX_RESTARTS": "0", "DDPJOB_RESTARTS_LEFT": "LEFT"}, (1, 1, 1)),
        ("--max-restarts 50", {"PET_MAX_RESTARTS": "0", "DDPJOB_RESTARTS_LEFT": "LEFT"}, (2, 50, 10)),
        ("--max-restarts 0", {"PET_MAX_RESTARTS": "0", "DDPJOB_RESTARTS_LEFT": "LEFT"}, (0, 0, 0)),
    ],
)
def test_the_budget_is_the_minimum_of_user_and_operator(line: str, environ: Any, budget: Any) -> None:
    left = '{"application": 2, "infrastructure": 99, "stall": 10}'
    found = options(f"{line} train.py", **{k: v.replace("LEFT", left) for k, v in environ.items()})
    assert found.budget[:3] == budget


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("node0:400", "node0", 400),
        ("node0", "node0", 29500),
        ("[fd00::1]:400", "fd00::1", 400),
        ("[fd00::1]", "fd00::1", 29500),
        ("fd00::1", "fd00::1", 29500),
    ],
)
@pytest.mark.parametrize("nodes", ["", "--nnodes=2 --node-rank=1"])
def test_an_endpoint_may_be_an_ipv6_address(nodes: str, endpoint: str, host: str, port: int) -> None:
    """An endpoint may be an IPv6 address, which torch resolves only without brackets."""
    found = options(f"{nodes} --rdzv-endpoint={endpoint} train.py")
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_node_0_is_the_node_named_by_the_endpoint(backend: str) -> None:
    line = f"--rdzv-backend {backend} --rdzv-endpoint head:29400 --nnodes 2:2 --node-rank 1 train.py"
    found = options(line, PET_MASTER_ADDR="other", PET_MASTER_PORT="1")
    assert (found.host, found.port, found.nodes) == ("head", 29400, 2)


def test_standalone_is_one_node_whatever_the_environment_contains() -> None:
    found = options("--standalone --nproc 2 train.py", PET_NNODES="4", PET_MASTER_PORT="1")
    assert (found.nodes, found.port, found.host) == (1, None, "127.0.0.1")
    assert len(found.run_id) == 36


@pytest.mark.parametrize(
    ("text", "streams"), [("0", {0: 0, 1: 0}), ("3", {0: 3, 1: 3}), ("0:1,1:2", {0: 1, 1: 2}), ("1:3", {0: 0, 1: 3})]
)
def test_redirects_and_tee_are_for_all_ranks_or_for_each(text: str, streams: dict[int, int]) -> None:
    found = options(f"--nproc 2 -r {text} --tee {text} train.py")
    assert (found.output.redirects, found.output.tee) == (streams, streams)


def test_filters_are_comma_separated_and_two_commas_stand_for_one() -> None:
    found = options("--duplicate-stdout-filters a,b,,c --local-ranks-filter 0,2 train.py")
    assert (found.output.filters, found.output.shown) == ((("a", "b,c"), ()), {0, 2})


@pytest.mark.parametrize(
    ("visible", "present", "wanted"),
    [(None, 4, 4), ("0,1", 4, 2), ("", 4, 0), ("-1", 4, 0), ("0,-1,2", 4, 1), ("GPU-8a,GPU-9b", 4, 2), ("0,1", 1, 1)],
)
def test_only_the_gpus_visible_to_a_rank_are_counted(monkeypatch: Any, visible: Any, present: int, wanted: int) -> None:
    names = [f"nvidia{k}" for k in range(present)] + ["nvidiactl", "nvidia-uvm", "null"]
    monkeypatch.setattr(os, "listdir", lambda path: names if path == "/dev" else [])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert options("--nproc auto train.py", **environ).nproc == (wanted or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nnodes 4:1 --node-rank 0 train.py", "--nnodes: 1 is less than 4"),
        ("--nnodes 1:x --node-rank 0 train.py", "--nnodes: 'x' is not a number"),
        ("--nnodes 0:2 --node-rank 0 train.py", "--nnodes: 0 is less than 1"),
        ("--nnodes 1:2 train.py", "--node-rank: missing"),
        ("--nnodes 1:2 --node-rank 0 --rdzv-conf snooze=soon train.py", "--rdzv-conf: snooze: 'soon' is not a number"),
        ("--nnodes 2 train.py", "--node-rank: missing"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank: 2 is not below --nnodes: 2"),
        ("--nproc 0 train.py", "--nproc-per-node: 0 is less than 1"),
        ("--nproc many train.py", "--nproc-per-node: 'many' is not a number"),
        ("--nproc xpu train.py", "--nproc-per-node: xpu"),
        ("--rdzv-backend etcd-v2 train.py", "--rdzv-backend: 'etcd-v2'"),
        ("--event-log-handler console train.py", "--event-log-handler"),
        ("--logs-specs mine train.py", "--logs-specs"),
        ("--numa-binding node train.py", "--numa-binding"),
        ("--no-python -m pkg", "--module: --no-python"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint h:0 train.py", "--rdzv-endpoint: port 0"),
        ("--master-port 70000 train.py", "--master-port: 70000 is not a port"),
        ("--tee 4 train.py", "--tee: '4'"),
        ("--shutdown-timeout -1 train.py", "--shutdown-timeout: '-1'"),
        ("--elastic train.py", "--elastic"),
        ("--nproc 2", "training_script"),
        ("--rdzv-endpoint=:400 train.py", "--rdzv-endpoint: ':400' has no host"),
        ("--nproc-per-node=99999999 train.py", "--nproc-per-node: 99999999: at most 1024 ranks"),
        ("--signals-to-handle=SIGTERM,SIGUSR3 train.py", "--signals-to-handle: 'SIGUSR3' is not a signal that can be"),
        ("--signals-to-handle=SIGKILL train.py", "'SIGKILL' is not a signal that can be handled"),
        ("--rdzv-conf timeout train.py", "--rdzv-conf: 'timeout' has no value. Give it as timeout=60"),
        ("--rdzv-conf join_timeout=5,timeout= train.py", "--rdzv-conf: 'timeout' has no value"),
        ("--rdzv-conf =60 train.py", "--rdzv-conf: '=60' has no name"),
        ("--signals-to-handle=SIGCHLD train.py", "'SIGCHLD' is not a signal that can be handled"),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(capsys: Any, line: str, said: str) -> None:
    assert said in refusal(capsys, line)


def test_more_nodes_than_the_job_has_are_refused_at_its_address(capsys: Any) -> None:
    """More nodes than the job has must be refused, because a script with such a --nnodes would wait in vain."""
    of_job = {"DDPJOB_UID": "uid", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0.job"}
    assert "--nnodes: 3: the job has 2 nodes" in refusal(capsys, "--nnodes 3 train.py", **of_job)
    assert options("--nnodes 3 --master-addr other train.py", **of_job).nodes == 3, "they may come to another address"
    assert options("--nnodes 1 --node-rank 0 prepare.py", **of_job).nodes == 1


def test_the_operator_passes_the_restarts_in_a_row_and_the_number_of_the_pod() -> None:
    left = '{"application": 2, "infrastructure": 99, "stall": 10, "inARow": 4, "chargedInARow": 2}'
    found = options("train.py", DDPJOB_RESTARTS_LEFT=left, DDPJOB_REPLACEMENT="3")
    assert (found.budget.total, found.budget.history.in_a_row, found.budget.history.charged_in_a_row) == (111, 4, 2)
    assert (found.has_operator, found.replacement) == (True, 3)
    alone = options("train.py")
    assert (alone.has_operator, alone.replacement, alone.policy) == (False, 0, ())


def test_a_pod_gets_the_budget_together_with_the_restarts_already_counted_in_it() -> None:
    known = '{"replacement": 1, "application": 2, "infrastructure": 0, "stall": 3}'
    text = f'{{"application": 2, "infrastructure": 99, "stall": 10, "replaced": 4, "known": {known}}}'
    grant = Grant.read(text)
    assert (grant.replaced, grant.known) == (4, (1, (2, 0, 3)))
    capped = options("--max-restarts 3 train.py", DDPJOB_RESTARTS_LEFT=text).budget
    assert capped.renewed(grant._replace(replaced=5), 1)[:4] == (3, 3, 3, 3), "of --max-restarts in the whole life"
    with pytest.raises(ValueError, match="DDPJOB_RESTARTS_LEFT"):
        Grant.read(text.replace("3}", "-3}"))


@pytest.mark.parametrize(("said", "stall", "grace"), [("900", 900.0, 900.0), ("0", 0.0, 0.0), ("", None, 0.1)])
def test_stall_limit_and_restart_grace_are_read(said: str, stall: float | None, grace: float) -> None:
    found = options("train.py", DDPJOB_STALL_TIMEOUT=said, DDPJOB_RESTART_GRACE=said)
    assert (found.stall_seconds, found.broken_grace_seconds) == (stall, grace)


def test_the_failure_policy_is_read_as_the_operator_writes_it() -> None:
    found = options("train.py", DDPJOB_FAILURE_POLICY='[{"action": "Ignore", "codes": [3, 4], "notIn": true}]')
    assert found.policy == (("Ignore", {3, 4}, True),)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("DDPJOB_RESTARTS_LEFT", "3", 'must have the form {"application": 3'),
        ("DDPJOB_RESTARTS_LEFT", '{"application": 3}', 'must have the form {"application": 3'),
        (
            "DDPJOB_RESTARTS_LEFT",
            '{"application": -1, "infrastructure": 1, "stall": 1}',
            'must have the form {"application": 3',
        ),
        (
            "DDPJOB_RESTARTS_LEFT",
            '{"application": "x", "infrastructure": 1, "stall": 1}',
            'must have the form {"application": 3',
        ),
        ("DDPJOB_FAILURE_POLICY", "{", 'is not [{"action": "FailJob", "codes": [3]'),
        ("DDPJOB_FAILURE_POLICY", '{"action": "Count"}', "is not [{"),
        ("DDPJOB_FAILURE_POLICY", '[{"action": "Restart", "codes": [3]}]', "action is FailJob, Ignore or Count"),
        ("DDPJOB_FAILURE_POLICY", '[{"action": "Count", "codes": ["3"]}]', "is not [{"),
        ("DDPJOB_REPLACEMENT", "-1", "DDPJOB_REPLACEMENT: '-1' is not 0, 1"),
        ("DDPJOB_REPLACEMENT", "new", "DDPJOB_REPLACEMENT: 'new' is not 0, 1"),
        ("DDPJOB_STALL_TIMEOUT", "soon", "DDPJOB_STALL_TIMEOUT: 'soon' is not a number of seconds"),
        ("DDPJOB_STALL_TIMEOUT", "-1", "'-1' is not a number of seconds"),
        ("DDPJOB_RESTART_GRACE", "1e99", "DDPJOB_RESTART_GRACE: '1e99' is not a number of seconds"),
        ("DDPJOB_STALL_TIMEOUT", "nan", "'nan' is not a number of seconds"),
    ],
)
def test_a_damaged_variable_of_the_operator_is_refused_with_the_expected_form(capsys, name, text, said):
    found = refusal(capsys, "train.py", **{name: text})
    assert name in found
    assert said in found.replace("\n", " ")


def test_a_wrong_option_is_answered_in_two_lines(capsys: Any) -> None:
    """A wrong option must give two lines, and not seventeen lines of usage as in torchrun."""
    first, second = refusal(capsys, "--nprocs-per-node 2 train.py").splitlines()
    assert "--nprocs-per-node" in first or "training_script" in first
    assert second == "(ddprun --help has all options)"


def test_the_help_has_each_option_once_under_a_heading_and_ends_with_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        options("--help")
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 112
    assert [line for line in lines if line.endswith(":")][1:-1] == [
        "nodes and ranks:", "the script:", "restarts and signals:", "output:", "accepted without effect, or refused:",
        "what to run:",
    ]  # fmt: skip
    assert sum("--nproc-per-node N " in line for line in lines) == 1
    assert "train.py" in lines[-1]


def test_version_is_an_option(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        options("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ddprun ")


def test_a_range_of_nodes_has_a_smallest_number_and_waits_as_long_as_torchrun_does() -> None:
    found = options("--nnodes 2:4 --node-rank 3 train.py")
    assert (found.least, found.nodes, found.place) == (2, 4, 3)
    assert (found.last_call_seconds, found.snooze_seconds) == (30, 30)
    found = options("--nnodes 2:4 --node-rank 3 --rdzv-conf last_call_timeout=5,snooze=0 train.py")
    assert (found.last_call_seconds, found.snooze_seconds) == (5, 0)
    assert options("--nnodes 2 --node-rank 1 train.py").least == 2
