"""docs/reference.md agrees with the code."""

from __future__ import annotations

from pathlib import Path

import reference_page
from ddpjob_operator.job import api, crd

CHECKED_IN = Path(__file__).parents[2] / "docs/reference.md"


def test_the_checked_in_reference_is_generated_from_the_types() -> None:
    assert CHECKED_IN.read_text(encoding="utf-8") == reference_page.to_markdown(), (
        "docs/reference.md differs from the types: run `python tools/reference_page.py > docs/reference.md`"
    )


def test_the_reference_has_each_field_of_the_spec_with_type_and_default() -> None:
    lines = reference_page.to_markdown().splitlines()
    nodes = crd.meaning(api.Spec, crd.fields(api.Spec)["nodes"])
    assert f"| `nodes` | whole number 1–10000 | `1` | {nodes} |" in lines
    for name in crd.fields(api.Spec):
        assert any(line.startswith(f"| `{name}` | ") for line in lines), name


def test_nested_fields_have_their_full_path() -> None:
    text = reference_page.to_markdown()
    assert "| `failurePolicy.rules[].onExitCodes.values` | list of: whole number 1–255 | " in text
    assert "| `conditions[].lastTransitionTime` | time | " in text


def test_no_table_row_has_an_extra_cell() -> None:
    tables = [line for line in reference_page.to_markdown().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {4, 5}
