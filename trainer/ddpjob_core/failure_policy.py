"""The user's rules for exit codes: apart from `rules.py`, because `ddprun` imports this before its ranks start."""

from __future__ import annotations

from typing import Literal, NamedTuple

Action = Literal["FailJob", "Ignore", "Count"]


class PolicyRule(NamedTuple):
    """A rule of spec.failurePolicy."""

    action: Action
    codes: frozenset[int]
    inverted: bool = False
    """Whether it is for all codes but these (NotIn)."""

    def matches(self, exit_code: int | None) -> bool:
        """As in a Job's podFailurePolicy: 0 is never a failure's code."""
        return bool(exit_code) and (exit_code in self.codes) != self.inverted
