"""The checkpoint from which a training resumes is logged when it is loaded, and reported during the training."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ddpjob


def until(receiver: Any, **fields: Any) -> dict[str, Any]:
    """Return the next report that has these fields."""
    while (post := receiver.next()) is None or any(post.get(name) != value for name, value in fields.items()):
        pass
    return post  # type: ignore[no-any-return]


def test_a_saved_step_is_reported_at_once(receiver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved step must be reported at once, because the log line about a restart names the last saved step."""
    monkeypatch.setenv("DDPJOB_STATUS_INTERVAL", "3600")
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    ddpjob.progress(1)
    assert "savedStep" not in receiver.next()
    for step in (5, 6):
        ddpjob.progress(step)
        snapshot.save(step, weights=torch.ones(2))
        snapshot.close()
    assert "resumedStep" not in until(receiver, savedStep=6)


def test_a_resume_is_shown_and_sent_once(receiver: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A resume must be logged and reported once, also if a complete training is run again and makes no step."""
    first = ddpjob.Snapshot(tmp_path / "s")
    assert first.load() == 0
    assert "resumed" not in capfd.readouterr().err
    first.save(1125, weights=torch.ones(2))
    first.close()
    assert ddpjob.Snapshot(tmp_path / "s").load() == 1125
    assert capfd.readouterr().err.splitlines() == [f"ddpjob: resumed at step 1125 from {tmp_path / 's'}"]
    report = until(receiver, resumedStep=1125)
    assert (report["savedStep"], report["resumedFrom"]) == (1125, str(tmp_path / "s"))
    ddpjob.progress(1126)
    until(receiver, step=1126, resumedStep=1125)
