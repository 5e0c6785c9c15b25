"""How an agent reports a script or module that does not exist, so that a rank could not start."""

import os
from pathlib import Path

import pytest

from ddpjob_core import rules
from ddpjob_core.failures import Failure
from ddprun.missing_script import explains, missing
from ddprun.options import parse


@pytest.mark.parametrize(("line", "code"), [("trian.py", 2), ("-m trian", 1)])
def test_only_the_exit_code_of_python_for_a_missing_script_is_explained(line: str, code: int) -> None:
    script = parse(line.split(), {}).script
    told = Failure(0, exit_code=code, exception=explains(code, "", script, {}))
    assert told.lacks_program
    assert rules.cannot_start(told)
    assert explains(3, "", script, {}) == ""
    assert explains(3 - code, "", script, {}) == ""
    assert explains(code, "ValueError: of the script", script, {}) == ""


@pytest.mark.parametrize("line", ["train.py", "-m train", "--no-python train.py", "-m train.inner"])
def test_an_existing_or_uncheckable_path_explains_nothing(line, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    script = parse(line.split(), {}).script
    assert [explains(code, "", script, {}) for code in (1, 2)] == ["", ""]


def test_an_unreadable_folder_does_not_end_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder cannot be read, the agent cannot suggest a similar name, but must not fail."""

    def refused(_: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    assert missing(parse([str(tmp_path / "trian.py")], {}).script, {}) == ""
