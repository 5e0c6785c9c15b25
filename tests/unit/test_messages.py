"""The glossary of messages agrees with the code, and contains every message that users meet."""

from __future__ import annotations

import re
from pathlib import Path

import messages_page
from ddpjob_operator.job import reasons

ROOT = Path(__file__).parents[2]


def test_the_checked_in_page_is_generated_from_the_reasons() -> None:
    checked_in = (ROOT / "docs/messages.md").read_text(encoding="utf-8")
    assert checked_in == messages_page.to_markdown(), "docs/messages.md differs from job/reasons.py: `make generate`"


def test_the_page_has_each_reason_with_its_occasion_and_the_next_step() -> None:
    text = messages_page.to_markdown()
    for reason in reasons.ALL.values():
        kind = "Warning" if reason.warning else "Normal"
        assert f"| `{reason.name}` | {kind} | {reason.when} | {reason.todo or '–'} |" in text


def test_no_warning_leaves_a_user_without_a_next_step() -> None:
    assert [reason.name for reason in reasons.ALL.values() if reason.warning and not reason.todo] == []


def test_every_reason_of_an_event_is_on_the_page() -> None:
    """Users must find the reason of an Event when they search for it."""
    source = "\n".join(file.read_text() for file in (ROOT / "operator").rglob("*.py"))
    assert set(re.findall(r'Event\("(?:Normal|Warning)", "(\w+)"', source)) == set()


def test_every_link_on_the_help_pages_leads_to_an_existing_target() -> None:
    """Users in trouble must not follow a broken link."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs" / f"{n}.md" for n in ("failures", "messages", "versions")),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, f"{page.name}: {link}"


def test_the_page_about_failures_has_every_reason_to_wait() -> None:
    text = (ROOT / "docs/failures.md").read_text()
    waits = (
        reasons.UNSCHEDULABLE,
        reasons.CANNOT_START,
        reasons.CREATE_REFUSED,
        reasons.INVALID_SPEC,
        reasons.NAME_TAKEN,
    )
    waits += (reasons.WAITING_FOR_OLD_PODS, reasons.WAITING_FOR_DELETED_JOB, reasons.START_BACK_OFF, reasons.WAITS_LONG)
    waits += (reasons.GANG_UNAVAILABLE, reasons.WAITING_FOR_ADMISSION)
    assert [reason.name for reason in waits if f"`{reason.name}`" not in text] == []
