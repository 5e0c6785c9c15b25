"""The generated pages are complete. `make check` compares the checked-in pages with their generators."""

import re
from pathlib import Path

import pytest

import check_page
import ddpjob_check as check
import environment_page
import messages_page
import reference_page
from ddpjob_operator.job import api, crd, reasons

ROOT = Path(__file__).parents[2]


def test_the_reference_has_each_field_of_the_spec_with_type_and_default() -> None:
    text = reference_page.to_markdown()
    nodes = crd.meaning(api.Spec, crd.fields(api.Spec)["nodes"])
    assert f"\n| `nodes` | whole number 1–10000 | `1` | {nodes} |\n" in text
    assert all(f"\n| `{name}` | " in text for name in crd.fields(api.Spec))
    assert "| `failurePolicy.rules[].onExitCodes.values` | list of: whole number 1–255 | " in text
    assert "| `conditions[].lastTransitionTime` | time | " in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {4, 5}, "no row has an extra cell"


def test_a_variable_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable without a description must be refused, because only its author would know its meaning."""
    monkeypatch.delitem(environment_page.MEANINGS, "DDPJOB_UID")
    with pytest.raises(SystemExit, match="no meaning of DDPJOB_UID"):
        environment_page.to_markdown()


def test_the_messages_have_each_reason_with_its_occasion_and_the_next_step() -> None:
    text = messages_page.to_markdown()
    for reason in reasons.ALL.values():
        kind = "Warning" if reason.warning else "Normal"
        assert f"| `{reason.name}` | {kind} | {reason.when} | {reason.todo or '–'} |" in text
        assert reason.todo or not reason.warning, "no warning leaves a user without a next step"


def test_every_reason_of_an_event_is_in_the_table_of_reasons() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "operator").rglob("*.py"))
    assert set(re.findall(r'Event\("(?:Normal|Warning)", "(\w+)"', source)) == set()


def test_the_page_about_failures_has_every_reason_to_wait() -> None:
    text = (ROOT / "docs/failures.md").read_text()
    waits = (
        *(reasons.UNSCHEDULABLE, reasons.CANNOT_START, reasons.CREATE_REFUSED, reasons.INVALID_SPEC),
        *(reasons.NAME_TAKEN, reasons.WAITING_FOR_OLD_PODS, reasons.WAITING_FOR_DELETED_JOB, reasons.START_BACK_OFF),
        *(reasons.WAITS_LONG, reasons.GANG_UNAVAILABLE, reasons.WAITING_FOR_ADMISSION),
    )
    assert [reason.name for reason in waits if f"`{reason.name}`" not in text] == []


def test_the_page_about_checks_has_each_rule_with_its_reason_and_both_lines() -> None:
    text = check_page.to_markdown()
    assert re.findall(r"^### `([a-z]+(?:-[a-z0-9]+)+)`$", text, flags=re.MULTILINE) == [r.name for r in check.RULES]
    assert len({rule.name for rule in check.RULES}) == len(check.RULES)
    for rule in check.RULES:
        assert rule.why in " ".join(text.split())
        assert rule.why.endswith(".")
        assert rule.wrong.splitlines()[0] in text
        assert rule.right.splitlines()[0] in text
