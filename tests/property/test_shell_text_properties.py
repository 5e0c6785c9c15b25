"""What a shell reads of a script, for any text: the reader never fails, and quotes hide what they hide."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.job.shell_text import references

PIECES = [
    *"'\"$`\\(){}#<>;&|\n\t -=",
    "$RANK", "${RANK", "$(", "<<EOF", "EOF\n", "<<-'E'", "bash -c ", "torchrun ", "((", "))",
    "RANK", "$((", "eval ", "${RANK:-", "[ -z ", "x",
]  # fmt: skip
SCRIPTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=40)


@given(SCRIPTS)
def test_each_reference_is_where_its_name_stands_and_they_are_in_order(script: str) -> None:
    """convert writes other names into these places: a wrong one would change a command that works."""
    found = references(script)
    assert all(script[one.begin : one.end] == one.name for one in found)
    places = [one.begin for one in found]
    assert places == sorted(set(places))


@given(SCRIPTS)
def test_a_shell_reads_nothing_in_single_quotes_and_all_of_a_nested_shells_script(text: str) -> None:
    hidden = text.replace("'", "").replace("environ", "").replace("getenv", "")
    assert [one for one in references(f"echo '{hidden}'") if one.by_shell] == []
    script = text.replace("'", "")
    nested = [one.name for one in references(f"sh -c {shlex.quote(script + ' ')}") if one.by_shell]
    assert nested == [one.name for one in references(script + " ") if one.by_shell]


@given(st.sampled_from("({`'\"$"), st.integers(1, 5000))
def test_depth_is_bounded(sign: str, count: int) -> None:
    """A script of 5,000 braces must not end the check with a RecursionError."""
    for piece in (sign, f"${sign}", f'"${sign}', f"${{a:-{sign}"):
        references(piece * count)
