"""docs/environment.md has every variable that the code sets or reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import environment_page

CHECKED_IN = Path(__file__).parents[2] / "docs/environment.md"


def test_the_checked_in_page_is_generated_from_the_code() -> None:
    assert CHECKED_IN.read_text(encoding="utf-8") == environment_page.to_markdown(), (
        "docs/environment.md differs from the code: run `python tools/environment_page.py > docs/environment.md`"
    )


def test_a_variable_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable without a description must be refused, because only its author would know its meaning."""
    monkeypatch.delitem(environment_page.MEANINGS, "DDPJOB_UID")
    with pytest.raises(SystemExit, match="no meaning of DDPJOB_UID"):
        environment_page.to_markdown()
