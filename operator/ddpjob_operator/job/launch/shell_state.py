"""The state of a shell on one path through a script, and the values of words and tests in this state.

A status is "0", FAILED (any other exit code) or "" (unknown).
"""

from __future__ import annotations

import operator as op
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from ddpjob_operator.job.launch import shell
from ddpjob_operator.job.launch.withheld import NOTHING, Withheld

FAILED = "failed"
JOB = "job "  # begins the value of `$!`; the index of the background job follows
_TEXT_MAX = 40
_TEST_WORDS_MAX = 60
_PARAMETER = r"[A-Za-z_]\w*|[?!]"
_VARIABLE = re.compile(rf"\$(?:({_PARAMETER})|\{{({_PARAMETER})(?:\[[@*]\])?\}})")
_ALL_OF_ARRAY = re.compile(r"\$\{[A-Za-z_]\w*\[@\]\}")
_PIPESTATUS = re.compile(r"\$\{?PIPESTATUS(?:\[(\d)\])?\}?")
_CALCULATION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")
_CHANGE = re.compile(
    r"([-+])\1\s*([A-Za-z_]\w*)|(?<!\w)([A-Za-z_]\w*)\s*(?:([-+])\4|([-+*/%|&^]|<<|>>|)=(?!=)\s*([^\s,;()]*))"
)
_NAME = re.compile(r"\$?\b([A-Za-z_]\w*)")
_COMPARISON = re.compile(r"\s*(!?)\s*(\$?\??\{?\w*\}?)\s*(?:(==|!=|<=|>=|<|>)\s*(\d+))?\s*")
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": op.eq, "==": op.eq, "!=": op.ne, "-eq": op.eq, "-ne": op.ne, "-gt": op.gt, "-ge": op.ge, "-lt": op.lt,
    "-le": op.le, "<": op.lt, ">": op.gt, "<=": op.le, ">=": op.ge,
}  # fmt: skip
_CALCULATES: dict[str, Callable[[int, int], int]] = {"+": op.add, "-": op.sub, "*": op.mul}
_JOINS = (({"-o", "||"}, "0", FAILED), ({"-a", "&&"}, FAILED, "0"))
"""Operators between tests, lowest precedence first: the status that one operand decides, and the one that needs all."""
INVERTED = {"0": FAILED, FAILED: "0", "": ""}


class ShellState(Struct, frozen=True):
    status: str = "0"
    """$?"""
    leaving: str = ""
    """The builtin that is leaving the script, function or loop: exit, return, break or continue."""
    failed: bool = False
    """True if the launcher that is followed has run and failed."""
    ran: frozenset[shell.ShellNode] = frozenset()
    """All launchers that have run."""
    after: frozenset[shell.ShellNode] = frozenset()
    """The launchers that ran after the failed one."""
    loss: tuple[str, str] = ("", "")
    """How the exit code of the failed launcher was lost, and the text of the script that loses it."""
    errexit: bool = False
    pipefail: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    traps: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, shell.ShellNode] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()
    pipe: tuple[str, ...] = ("0",)
    """$PIPESTATUS"""
    arguments: tuple[str, ...] = ()
    program: str = ""
    """The shell's program; "" outside of any shell."""
    trapped: str = ""
    """The status with which the shell began its EXIT trap. A plain `exit` in the trap keeps it."""
    withheld: Withheld = NOTHING
    """Variables of the job that the shell's commands do not have."""

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that is equal for equal states, to find repeated states."""
        return tuple(tuple(value.items()) if isinstance(value, dict) else value for value in astuple(self))

    @property
    def size(self) -> int:
        """The number of items in this state, because each step copies and compares them."""
        parts = (self.variables, self.functions, self.ran, self.after, self.jobs, self.arguments, self.pipe)
        return sum(map(len, parts))

    def ended(self, status: str = "0", **changes: Any) -> list[ShellState]:
        """Return a list of one: the state after a command with this status."""
        return [replace(self, status=status, **changes)]

    def losing(self, how: str, at: str, *, again: bool = False) -> ShellState:
        """Return the state after the command `at` hid the launcher's failure. again: also if another hid it before."""
        return replace(self, loss=(how, _short(at))) if self.failed and (again or not self.loss[0]) else self

    def ignoring(self, how: str, at: str) -> ShellState:
        """Return the state after the command `at` ignored $?, which hides the launcher's failure if $? held it."""
        return self.losing(how, at) if self.status == FAILED else self

    def inverted(self) -> list[ShellState]:
        """Return a list of one: the state after `!`."""
        return self.ignoring("not", "!").ended(INVERTED[self.status])

    def assigned(self, named: Iterable[tuple[str, str]], status: str = "0", text: str = "") -> list[ShellState]:
        """Return a list of one: the state after NAME=value and ARRAY+=(value). text: the whole command."""
        variables = dict(self.variables)
        named = [*named]
        for name, word in named:
            value = self.value(word)
            before = variables.get(name, "") if f"{name}+=(" in text else ""
            variables[name] = f"{before} {word if value is None else value}".lstrip()
        return self.ended(status, variables=variables, withheld=self.withheld.but([name for name, _ in named]))

    def calculated(self, node: shell.Simple, words: list[str]) -> ShellState:
        """Return the state after ((NAME += 1)), let NAME++ and $((NAME = 1))."""
        texts = words[1:] if words[:1] in (["(("], ["let"]) else []
        texts += [text for word in shell.words_of(node) for text in word.expanded if text.startswith("$((")]
        changed = {}
        for found in (found for text in texts for found in _CHANGE.finditer(text)):
            name, sign, right = found[2] or found[3], found[1] or found[4] or found[5], found[6] or "1"
            changed[name] = f"$(({name} {sign} {right}))" if sign else right
        return self.assigned(changed.items(), self.status)[0] if changed else self

    def expanded(self, node: shell.Simple, count: Callable[[int], None]) -> list[str]:
        """Return the words of a command with the known variables expanded. count: called with the characters added."""

        def known(found: re.Match[str]) -> str:
            value = self.variables.get(found[1] or found[2], "")
            value = value if value and value != FAILED and not value.startswith(JOB) else found[0]
            count(len(value))
            return value

        words: list[str] = []
        for word in node.words:
            if word.value in ("$@", "$*", "${@}"):
                count(sum(map(len, self.arguments), len(self.arguments)))
                words += self.arguments
                continue
            value = _VARIABLE.sub(known, word.value)
            is_split = not word.quoted or _ALL_OF_ARRAY.fullmatch(word.value)
            words += value.split() if value != word.value and is_split else [value]
        return words

    def value(self, text: str) -> str | None:
        """Return what a word expands to, or FAILED for a variable with a failed exit code; None if this is unknown."""
        if found := _PIPESTATUS.fullmatch(text):
            return (self.pipe[int(found[1] or 0) :] or ("",))[0] or None
        if arithmetic := re.fullmatch(r"\$\(\((.*)\)\)", text):
            if found := _CALCULATION.fullmatch(_NAME.sub(self._number, arithmetic[1])):
                return str(_CALCULATES[found[2]](int(found[1]), int(found[3])))
            if found := re.fullmatch(r"\s*(\w+)\s*", arithmetic[1]):
                text = f"${found[1]}"
            elif (found := _COMPARISON.fullmatch(arithmetic[1])) and (found[1] or found[3]):
                return {"0": "1", FAILED: "0"}.get(self.test(["((", arithmetic[1]]))
        found = _VARIABLE.fullmatch(text)
        if found is None:
            return None if "$" in text or "`" in text else text
        name = found[1] or found[2]
        value = self.status or None if name == "?" else self.variables.get(name)
        return None if value is None or "$" in value or "`" in value else value

    def _number(self, name: re.Match[str]) -> str:
        value = self.variables.get(name[1], "")
        return value if value.isdecimal() else name[0]

    def test(self, words: list[str]) -> str:
        """Return the status of [ ], [[ ]], test or (( )); "" for any other command."""
        if words[0] == "((" and len(words) > 1:
            found = _COMPARISON.fullmatch(words[1])
            if found is None:
                return "" if re.search(r"[=!<>]=|[<>&|]", words[1]) else "0"
            name = found[2] if found[2].startswith("$") else f"${found[2]}"
            status = self._compared([name, found[3] or "!=", found[4] or "0"])
            return INVERTED[status] if found[1] else status
        if words[0] not in ("[", "[[", "test"):
            return ""
        return self._joined([word for word in words[1:] if word not in ("]", "]]")])

    def _joined(self, words: list[str]) -> str:
        """Return the status of tests that are joined by -o, -a, || and &&."""
        for joins, deciding, otherwise in _JOINS if len(words) <= _TEST_WORDS_MAX else ():
            if place := next((i for i, word in enumerate(words) if word in joins), 0):
                parts = {self._joined(words[:place]), self._joined(words[place + 1 :])}
                return deciding if deciding in parts else otherwise if parts == {otherwise} else ""
        return INVERTED[self._compared(words[1:])] if words[:1] == ["!"] else self._compared(words)

    def _compared(self, words: list[str]) -> str:
        if len(words) != 3 or words[1] not in _COMPARED:
            return ""
        left, right, compare = self.value(words[0]), self.value(words[2]), _COMPARED[words[1]]
        if left == FAILED and right == "0":
            return "0" if compare(1, 0) else FAILED
        if left is None or right is None or FAILED in (left, right):
            return ""
        if left.isdecimal() and right.isdecimal():
            return "0" if compare(int(left), int(right)) else FAILED
        if compare not in (op.eq, op.ne):
            return ""
        return "0" if compare(left, right) else FAILED

    def matches(self, text: str, pattern: str) -> bool | None:
        """Return whether a word matches a pattern of `case`; None if this is unknown."""
        value = self.value(text)
        if pattern == "*":
            return True
        if value is None or re.search(r"[*?\[$]", pattern) or (value == FAILED and pattern != "0"):
            return None
        return value == pattern


def _short(text: str) -> str:
    line = " ".join(text.split(None, _TEXT_MAX))
    return line if len(line) <= _TEXT_MAX else f"{line[: _TEXT_MAX - 2]} …"
