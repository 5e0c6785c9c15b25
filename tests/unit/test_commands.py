"""Help, versions, completion, and the schema for editors."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from ddpjob_cli.commands.main import cli
from ddpjob_cli.local.run_files.run_folder import RunFolder
from ddpjob_operator.job import schema
from ddpjob_operator.kube import program

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def said(*arguments: str, **environ: str) -> str:
    result = CliRunner().invoke(cli, arguments, env=environ, prog_name="ddpjob")
    assert result.exit_code == 0, result.output
    return result.output


def test_help_and_version_work_as_words_too() -> None:
    """`ddpjob help` and `ddpjob version` must work, because users of git or kubectl type these words first."""
    assert said("help") == said("--help")
    assert said("help", "check").splitlines()[1:] == said("check", "--help").splitlines()[1:]
    assert said("version").startswith("ddpjob ")


def test_the_list_of_commands_truncates_no_summary() -> None:
    """The list of commands must not cut a summary, such as `each node becomes a...`."""
    assert "..." not in said("--help").replace("[ARGS]...", "").replace("[OPTIONS] COMMAND", "")


def test_the_error_about_an_unknown_command_points_to_the_list_of_commands() -> None:
    result = CliRunner().invoke(cli, ["help", "chekc"], prog_name="ddpjob")
    assert result.exit_code == 2
    assert "ddpjob help lists them" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_gets_its_words_from_ddpjob(shell: str) -> None:
    assert f"_DDPJOB_COMPLETE={shell}_complete" in said("completion", shell)


@pytest.mark.parametrize("command", ["logs", "stacks", "report"])
def test_a_shell_completes_the_runs_of_this_machine(command: str, tmp_path: Path) -> None:
    """A shell must complete names of runs. Otherwise users run `ddpjob list` and copy a long name."""
    for name in ("digits-long", "digits", "other"):
        RunFolder(name, tmp_path).close()
    typed = ["ddpjob", command, "--dir", str(tmp_path), "dig"]
    asked = {"_DDPJOB_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    done = CliRunner().invoke(cli, prog_name="ddpjob", env=asked)
    assert done.output.split() == ["plain,digits", "plain,digits-long"]


# ---- the schema for editors


def wrong(body: Any, rules: dict[str, Any]) -> list[str]:
    """Return the places that an editor would mark in a body, and the reasons."""
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(rules).iter_errors(body)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_editor_finds_the_schema_by_the_first_line_of_each_example_and_marks_no_error_there(path: Path) -> None:
    """An editor must mark no error in an example. Otherwise users learn to ignore its marks."""
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    relative = first.removeprefix("# yaml-language-server: $schema=")
    found = json.loads((path.parent / relative).read_text(encoding="utf-8"))
    assert wrong(yaml.safe_load(path.read_text(encoding="utf-8")), found) == []


def job(**spec: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "i", **spec.pop("container", {})}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "mine"},
        "spec": {"nodes": 1, "template": template, **spec},
    }  # fmt: skip


IN_TRAINER = "spec.template.spec.containers[0]"


@pytest.mark.parametrize(
    ("body", "marked"),
    [
        (job(replicas=2), "spec: Additional properties are not allowed ('replicas' was unexpected)"),
        (job(nodes=0), "spec.nodes: 0 is less than the minimum"),
        (job(nprocPerNode="all"), "spec.nprocPerNode: 'all' is not valid under any"),
        (job(nprocPerNode=0), "spec.nprocPerNode: 0 is not valid under any"),
        (job(backend="smoke-signs"), "spec.backend: 'smoke-signs' is not one of"),
        (job(container={"command": "torchrun train.py"}), f"{IN_TRAINER}.command: 'torchrun train.py' is not of type"),
        (job(container={"env": [{"name": "A", "valeu": "b"}]}), f"{IN_TRAINER}.env[0]: Additional properties are not"),
        (job(container={"resources": {"limits": {"cpu": "lots"}}}), f"{IN_TRAINER}.resources.limits.cpu: 'lots' does"),
    ],
)  # fmt: skip
def test_an_editor_marks_a_mistake_at_its_field(body: dict[str, Any], marked: str) -> None:
    (found,) = wrong(body, schema.schema())
    assert found.startswith(f"$.{marked}")


def test_an_editor_marks_nothing_in_sound_jobs() -> None:
    for sound in (
        job(nprocPerNode="auto", onePodPerNode=True, stall={"timeoutSeconds": 0}),
        job(
            container={"resources": {"limits": {"cpu": 0.5, "memory": "2Gi", "nvidia.com/gpu": 8}}, "future": {"a": 1}}
        ),
    ):
        assert wrong(sound, schema.schema()) == []


# ---- ddpjob-operator


def test_the_operators_help_and_version_start_nothing(capsys: Any) -> None:
    for option, begin in {"--help": "usage: ddpjob-operator", "--version": "ddpjob-operator "}.items():
        with pytest.raises(SystemExit) as ended:
            program.start([option])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(begin)


def test_the_operator_refuses_an_unknown_argument(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        program.start(["--namespace", "team-a"])
    assert ended.value.code == 2
    assert "--namespace" in capsys.readouterr().err


def test_the_help_of_run_fits_on_one_screen_with_all_its_options() -> None:
    """All options of `ddpjob run` must fit on one screen, because users who must scroll miss options."""
    lines = CliRunner().invoke(cli, ["run", "--help"], prog_name="ddpjob", terminal_width=80).output.splitlines()
    assert len(lines) <= 24
    text = "\n".join(lines)
    run = cli.commands["run"]
    assert all(max(option.opts, key=len) in text for option in run.params if option.param_type_name == "option")
