"""`ddpjob check` reports parts of a job's command that do not do what they seem to do, and nothing else."""

import json
from typing import Any

import pytest

from ddpjob_check.job import mistakes
from ddpjob_operator.job import api, validation

NEW = (
    "variable-of-ranks-unset",
    "not-expanded",
    "argument-taken-by-launcher",
    "variable-of-ranks",
    "variable-of-other-launcher",
)


def job(*words: str, env: dict[str, str] | None = None, nodes: int = 2, nproc: int = 2, **container: Any) -> api.DDPJob:
    variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
    trainer = {"name": "trainer", "image": "i", "command": list(words), "env": variables, **container}
    spec = {"nodes": nodes, "nprocPerNode": nproc, "template": {"spec": {"containers": [trainer]}}}
    head = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": {"name": "j"}}
    parsed, problems = validation.parse({**head, "spec": spec})
    assert not problems
    return parsed


def said(what: api.DDPJob, script: str = "", given: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    found = mistakes(what, script=script, given=given)
    return [(rule, text) for _, rule, text in found if rule in NEW or rule.startswith("variable-of-")]


def shell(text: str) -> api.DDPJob:
    return job("bash", "-c", text)


@pytest.mark.parametrize(
    ("words", "joined", "meant"),
    [
        (["torchrun train.py"], "torchrun train.py", "[torchrun, train.py]"),
        (["torchrun  --nproc-per-node 2 train.py"], None, '[torchrun, --nproc-per-node, "2", train.py]'),
        (["/usr/bin/python3 -u train.py"], None, "[/usr/bin/python3, -u, train.py]"),
        (["./start.sh --lr 0.1"], None, '[./start.sh, --lr, "0.1"]'),
        (["sh -c", "torchrun train.py"], "sh -c", "[sh, -c]"),
        (["torchrun train.py | tee log"], None, '[sh, -c, "exec torchrun train.py | tee log"]'),
        (["torchrun", "train.py --lr 0.1"], "train.py --lr 0.1", '[train.py, --lr, "0.1"]'),
        (["torchrun", "--nnodes 2", "train.py"], "--nnodes 2", '[--nnodes, "2"]'),
        (["torchrun", "--tee", "3", "-m train", "--x"], "-m train", "[-m, train]"),
        (["python", "-m", "torch.distributed.run", "train.py --x"], "train.py --x", "[train.py, --x]"),
        (["python", "train.py --x 'a b'"], None, '[train.py, --x, "a b"]'),
        (["python", "-u train.py"], "-u train.py", "[-u, train.py]"),
        (["env", "A=1", "python3.11", "-X", "dev", "sub/train.py --x"], None, "[sub/train.py, --x]"),
        (["nosuch program"], None, "[nosuch, program]"),
        (["/opt/my tools/python", "train.py"], "", ""),
        (["/opt/my tools/run", "train.py"], "", ""),
        (["/opt/python 3/bin/python", "train.py"], "", ""),
        (["sh", "-c", "torchrun train.py"], "", ""),
        (["bash", "-ec", "torchrun train.py --x 1"], "", ""),
        (["python", "-c", "import a.py x"], "", ""),
        (["python", "-c", "print('train.py x')"], "", ""),
        (["python", "-W", "ignore::UserWarning", "train.py", "--text", "a.py b"], "", ""),
        (["torchrun", "--rdzv-conf", "a=1, b=2", "train.py", "--prompt", "a.py and b"], "", ""),
        (["torchrun", "train.py", "--names a b"], "", ""),
        (["torchrun", "my train.py"], "", ""),
        (["ddprun", "--no-python", "sh", "-c", "exec python train.py --x"], "", ""),
        (["conda", "run", "-n", "a", "torchrun", "train.py"], "", ""),
    ],
)
def test_a_command_in_one_word_is_an_error_that_quotes_the_separate_words(words, joined, meant):
    """A command in one word must be an error: `["torchrun train.py"]` is a program name that no image has."""
    found = [text for _, rule, text in mistakes(job(*words)) if rule == "words-in-one"]
    joined = words[-1] if joined is None else joined
    why = "no shell reads the command, so this is one word with spaces"
    assert found == ([f"{json.dumps(joined)}: {why}; write {meant}"] if joined else [])


def test_an_address_of_one_machine_is_no_error_before_a_local_run() -> None:
    """MASTER_ADDR=localhost is an error only in a cluster, because it works in `ddpjob run`."""
    at_localhost = job("python", "train.py", env={"MASTER_ADDR": "localhost"}, nproc=1)
    same_rank = job("python", "train.py", env={"RANK": "0"}, nproc=1)

    def rules(what: api.DDPJob, local: bool) -> set[str]:
        return {rule for _, rule, _ in mistakes(what, local=local)}

    assert rules(at_localhost, local=False) == {"variable-keeps-nodes-apart"}
    assert rules(at_localhost, local=True) == {"rendezvous-overridden"}
    assert rules(same_rank, local=True) == {"variable-keeps-nodes-apart"}


@pytest.mark.parametrize(
    "text",
    [
        "torchrun t.py 2>&1 | tee log_$RANK",
        'torchrun t.py > "log_${RANK}.txt"',
        "torchrun t.py | tee log_${RANK:-0}",
        'cat <<EOF > c.json\n{"rank": $RANK}\nEOF\ntorchrun t.py',
        "bash -c 'torchrun t.py > log.$RANK'",
        'bash -ec "torchrun t.py > log.\\$RANK"',
        "bash <<'EOF'\ntorchrun t.py > log.$RANK\nEOF",
        "echo $((RANK + 1)); torchrun t.py",
        "torchrun t.py --out $(dirname out_$RANK/x)",
        "eval 'torchrun t.py > $RANK'",
        "torchrun --no-python bash -c 'echo $RANK' > log_$RANK",
    ],
)
def test_a_shell_that_reads_the_rank_before_ranks_exist_is_named(text: str) -> None:
    """$RANK in a shell around the launcher must be named. It is empty there: all nodes write to one log file."""
    ((rule, sentence),) = said(shell(text))
    assert rule == "variable-of-ranks-unset"
    assert sentence.endswith("not set before the launcher has started the ranks; NODE_RANK is the node's")


@pytest.mark.parametrize(
    "text",
    [
        "torchrun t.py > log_$NODE_RANK",
        "torchrun --no-python bash -c 'exec python t.py --rank $RANK'",
        "mpirun -np 2 bash -c 'python t.py --rank $RANK'",
        "echo '$RANK' \\$RANK \"\\$RANK\"; awk '{print $RANK}' f; torchrun t.py # $RANK",
        "cat > run.sh <<'EOF'\necho $RANK\nEOF\ntorchrun --no-python bash run.sh",
        "RANK=$NODE_RANK; torchrun t.py > log_$RANK",
        "export RANK=${NODE_RANK:-0}; torchrun t.py > log_$RANK",
        "for RANK in 0 1; do echo $RANK; done; torchrun t.py",
        'if [ -n "$RANK" ]; then echo $RANK; fi; torchrun t.py',
        "torchrun t.py > log_$RANKS",
    ],
)
def test_a_shell_that_reads_no_rank_or_its_own_variable_is_left_alone(text: str) -> None:
    assert said(shell(text)) == []


def test_the_rank_variables_exist_in_a_pod_with_one_rank_and_env_may_set_them() -> None:
    words = ["bash", "-c", "torchrun t.py > log_$RANK"]
    assert said(job(*words, nproc=1)) == []
    assert said(job(*words, env={"RANK": "$(NODE_RANK)"})) == []
    assert said(job(*words, envFrom=[{"secretRef": {"name": "s"}}])) == []
    assert said(job("bash", "-c", "torchrun t.py > log_${RANK:-0}", nodes=1)) == [], "0 is the only node"


def test_a_rank_variable_that_kubernetes_cannot_expand_is_named() -> None:
    """$(RANK) must be named if the pod's env has no RANK, because the script would get the literal text $(RANK)."""
    for what in (job("torchrun", "t.py", "--rank=$(RANK)"), job("torchrun", "t.py", env={"LOG": "log_$(RANK)"})):
        ((rule, text),) = said(what)
        assert (rule, text.partition(":")[0]) == ("variable-of-ranks-unset", "$(RANK)")
    assert said(job("torchrun", "t.py", "--rank=$(RANK)", nproc=1)) == []
    assert said(job("torchrun", "t.py", "--rank=$$(RANK)")) == []


def test_launcher_options_from_slurm_variables_are_an_error_and_other_uses_a_warning() -> None:
    """A Slurm variable, empty in a pod, is an error in an option of torchrun, and a warning in a log's name."""
    text = "torchrun --nnodes=$SLURM_NNODES --node_rank ${SLURM_NODEID} t.py --id $SLURM_JOB_ID --job $LSB_JOBID"
    assert [(rule, sentence.partition(":")[0]) for rule, sentence in said(shell(text))] == [
        ("variable-of-other-launcher", "$SLURM_NNODES"),
        ("variable-of-other-launcher", "$SLURM_NODEID"),
        ("variable-of-other-launcher-unset", "$SLURM_JOB_ID"),
        ("variable-of-other-launcher-unset", "$LSB_JOBID"),
    ]
    assert "NNODES is meant" in said(shell(text))[0][1]
    given = ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID", "LSB_JOBID")
    assert said(shell(text), given=given) == [], "a local run within an allocation has them"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("torchrun --nproc_per_node ${SLURM_GPUS_ON_NODE} t.py", ["$SLURM_GPUS_ON_NODE"]),
        ("export NODES=$SLURM_NNODES; torchrun --nnodes=$NODES t.py", ["$SLURM_NNODES"]),
        ("python t.py --rank=$SLURM_PROCID", ["$SLURM_PROCID"]),
        ("exec ddprun t.py --rank $OMPI_COMM_WORLD_RANK", ["$OMPI_COMM_WORLD_RANK"]),
        ("torchrun --rdzv_id=$SLURM_JOB_ID t.py --name=run-$SLURM_PROCID", []),
    ],
)
def test_a_slurm_variable_as_a_number_or_an_address_is_an_error(text: str, errors: list[str]) -> None:
    found = [sentence.partition(":")[0] for rule, sentence in said(shell(text)) if rule == "variable-of-other-launcher"]
    assert found == errors


@pytest.mark.parametrize(
    "text",
    [
        "SLURM_NNODES=2; torchrun --nnodes=$SLURM_NNODES t.py",
        "torchrun --nnodes=${SLURM_NNODES:-2} t.py",
        'if [ -n "$SLURM_JOB_ID" ]; then echo $SLURM_JOB_ID; fi',
        "mpirun -np 2 bash -c 'python t.py $OMPI_COMM_WORLD_RANK'",
        "echo '$SLURM_NNODES'; torchrun t.py",
    ],
)
def test_a_slurm_variable_that_has_a_value_or_is_tested_first_is_left_alone(text: str) -> None:
    assert said(shell(text)) == []


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--data=$DATA_DIR"], "write $(DATA_DIR), which Kubernetes replaces"),
        (["--data", "${DATA_DIR}/x"], "write $(DATA_DIR), which Kubernetes replaces"),
        (["--rank=$NODE_RANK"], "write $(NODE_RANK)"),
        (["--data=$OTHER/x"], "set OTHER in env and write $(OTHER)"),
        (["$HOME/data"], "set HOME in env"),
        (["--data=${DATA_DIR:-/data}"], "start it with a shell"),
        (["--data", "~/data"], "write the whole path"),
        (["--data=~"], "write the whole path"),
        (["data/*.csv"], "list the files"),
        (["--files", "data/part-?.csv"], "list the files"),
        (["&&", "echo"], "start it with a shell"),
        (["--verbose", "|", "tee", "log"], "start it with a shell"),
        (["--lr=1", ">", "log"], "start it with a shell"),
        (["2>&1"], "start it with a shell"),
        ([">out/log.txt"], "start it with a shell"),
        (["--name=run-$(date +%F)"], "start it with a shell"),
        (["--host", "$(hostname)"], "start it with a shell"),
        (["--out=/data/`hostname`/x"], "start it with a shell"),
    ],
)
def test_words_that_only_a_shell_expands_are_named_if_no_shell_reads_them(words: list[str], fix: str) -> None:
    """A variable that no shell reads must be named. Otherwise the job uses a folder with the name `$DATA_DIR`."""
    what = job("torchrun", "t.py", *words, env={"DATA_DIR": "/data"})
    ((rule, text),) = said(what)
    assert (rule, text.partition(": ")[0] in words) == ("not-expanded", True)
    assert fix in text
    assert said(job("sh", "-c", " ".join(["torchrun", "t.py", *words]), env={"DATA_DIR": "/data"})) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--data=$(DATA_DIR)", "--regex", "a$", "^a$", "(a|b)$", "$"],
        ["dir=${now:%Y-%m-%d}", "a=${oc.env:HOME}", "x=${model.dim}", "y=${output_dir}", "~model.dropout", "$$HOME"],
        ["--label", "$x^2$", "--title", r"$\alpha_{T}$", "$E=mc^2$", "pa$WORD5x!"],
        ["--shards", "s-{000..100}.tar", "--re=.*", "^data/.*$", "--include", "*.py", "gs://b/*.tar", "http://h/?q=1"],
        ["--delimiter", ";", "--sep", "|", "--op", ">", "5", "HEAD~1"],
        ["--", "-c", "x"],
        ["$$(date)", "$(UNSET)", "--prompt", "write `code` here", "--math", "$(x+y)$"],
    ],
)
def test_patterns_formulas_and_signs_of_other_tools_are_left_alone(words: list[str]) -> None:
    assert said(job("torchrun", "t.py", *words, env={"DATA_DIR": "/data"})) == []
    assert said(job("python", "-c", "print('$HOME' > '|', *sys.argv)")) == []
    assert said(job("torchrun", "--no-python", "sh", "-c", "exec python t.py ~/d $HOME *.csv > log")) == []


def test_a_script_that_expands_variables_itself_gets_no_finding() -> None:
    words = ["torchrun", "t.py", "--data", "~/data", "data/*.csv", "$HOME/x"]
    assert len(said(job(*words))) == 3
    script = "os.path.expandvars(x); os.path.expanduser(args.data); glob.glob(args.files)"
    assert said(job(*words), script) == []


def test_a_value_of_env_that_only_a_shell_would_expand_is_named_at_its_entry() -> None:
    """PATH: /opt/bin:$PATH in env must be named, because no shell expands it, and the job's python is not found."""
    env = {"A": "1", "PATH": "/opt/bin:$PATH", "B": "${A}/x", "C": "$(A)/x", "TOKEN": "pa$WORD$", "D": "$$PATH"}
    found = [(path[-2:], text) for path, rule, text in mistakes(job("torchrun", "t.py", env=env)) if rule in NEW]
    assert [path for path, _ in found] == [("env", 1), ("env", 2)]
    assert found[0][1].endswith("Kubernetes replaces only $(PATH), by an earlier entry of env")


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "t.py", "--log", "5"],
        ["torchrun", "--nproc-per-node=2", "t.py", "--log=5"],
        ["torchrun", "-m", "pkg.train", "--x", "1", "--log"],
        ["python", "-m", "torch.distributed.run", "t.py", "--log"],
        ["python", "-m", "torch.distributed.launch", "t.py", "--log"],
        ["torchrun", "--no-python", "python", "t.py", "--log"],
        ["sh", "-c", "cd /w && exec torchrun t.py --log 5 2>&1 | tee x --no"],
    ],
)
def test_an_argument_that_abbreviates_options_of_torchrun_is_named(words: list[str]) -> None:
    """Script arguments that abbreviate torchrun options must be named: torchrun exits with `ambiguous option`."""
    ((rule, text),) = said(job(*words))
    assert rule == "argument-taken-by-launcher"
    assert text.startswith(
        "--log: torchrun reads it as an abbreviation of one of its options (--log-dir, --logs-specs)"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "t.py", "--", "--log", "5"],
        ["torchrun", "t.py", "x", "--", "--log", "5"],
        ["torchrun", "t.py", "--log-dir", "x", "--log-level", "5", "--nnodes=3", "--max-lr", "-mo"],
        ["ddprun", "t.py", "--log", "5"],
        ["python", "t.py", "--log", "5"],
        ["sh", "-c", "torchrun t.py; ls --no"],
        ["torchrun", "--no-python", "sh", "-c", "exec python t.py --log 5"],
    ],
)
def test_arguments_that_torchrun_passes_on_are_left_alone(words: list[str]) -> None:
    assert said(job(*words)) == []
