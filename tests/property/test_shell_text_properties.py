"""The reader of shell scripts finds the variables that a shell reads: it never fails, and respects quotes."""

import shlex

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.job.launch.shell_text import references

PIECES = [
    *"'\"$`\\(){}#<>;&|\n\t -=",
    "$RANK", "${RANK", "$(", "<<EOF", "EOF\n", "<<-'E'", "bash -c ", "torchrun ", "((", "))",
    "RANK", "$((", "eval ", "${RANK:-", "[ -z ", "x",
]  # fmt: skip
SCRIPTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=40)


@given(SCRIPTS)
def test_a_shell_expands_nothing_in_single_quotes_and_everything_in_a_nested_script(text: str) -> None:
    """A variable in single quotes must not count as read, and one in a nested script must."""
    script = text.replace("'", "")
    assert references(f"echo '{script}'") == ()
    assert references(f"sh -c {shlex.quote(script + ' ')}") == references(script + " ")


@given(st.sampled_from("({`'\"$"), st.integers(1, 5000))
def test_nesting_depth_is_bounded(sign: str, count: int) -> None:
    """The depth of nesting must be limited: 5,000 braces must not cause a RecursionError."""
    for piece in (sign, f"${sign}", f'"${sign}', f"${{a:-{sign}"):
        references(piece * count)
