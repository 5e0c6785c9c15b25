"""The user's rules for exit codes. Not in `rules.py`, because `ddprun` imports this module before its ranks start."""

from __future__ import annotations

from typing import Literal, NamedTuple

Action = Literal["FailJob", "Ignore", "Count"]


class PolicyRule(NamedTuple):
    """One rule of spec.failurePolicy."""

    action: Action
    codes: frozenset[int]
    inverted: bool = False
    """True if the rule applies to all codes except these (NotIn)."""

    def matches(self, exit_code: int | None) -> bool:
        """True if the rule applies to this exit code; never to 0, as in a Job's podFailurePolicy."""
        return bool(exit_code) and (exit_code in self.codes) != self.inverted
