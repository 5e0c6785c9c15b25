"""A typing error in an option, a name or a field is answered with a suggestion."""

from pathlib import Path

import pytest
from shell import Cli

JOB = """
apiVersion: training.ddpjob.io/v1alpha1
kind: DDPJob
metadata: {name: mine}
spec:
  nodes: 2
  template: {spec: {containers: [{name: trainer, image: x, command: [python, train.py]}]}}
"""


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (JOB, ["--set", "nprocPerNode=3"], "--set nprocPerNode=3: did you mean --set spec.nprocPerNode=3?"),
        (JOB.replace("  nodes", "  replicas"), [], "spec.replicas: unknown field; did you mean nodes?"),
        (JOB.replace("train.py", "trian.py"), [], "there is no file trian.py in "),
        (JOB.replace("train.py", "trian.py"), [], "did you mean train.py?"),
        (JOB.replace("python,", "pythn,"), [], '"pythn" is not a program on this machine; did you mean python?'),
        (JOB.replace("[python, train.py]", "[python train.py]"), [], "rite [python, train.py]"),
        (JOB.replace("[python, train.py]", "python train.py"), [], "Write [python, train.py]"),
        (JOB.replace("  nodes", "\tnodes"), [], "a tab: YAML is indented with spaces"),
        (JOB.replace("  nodes: 2", "  nodes: 2\n  nodes: 3"), [], "job.yaml:7: nodes is given twice, first in line 6"),
    ],
)
def test_a_typing_error_is_answered_with_a_suggestion(tmp_path: Path, text: str, words: list[str], said: str) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "train.py").write_text("print(1)\n")
    done = cli.here("run", "job.yaml", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_similar_name_is_suggested_for_a_missing_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    done = Cli(tmp_path).run("run", "trian.py")
    assert (done.returncode, done.stderr) == (2, "trian.py: No such file or directory; did you mean train.py?\n")
