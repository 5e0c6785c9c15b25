"""What an agent may charge for restarts in place, as its pod's environment says it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Left(NamedTuple):
    """What the operator says is left of the job's restarts, as it was when a pod was made."""

    application: int
    infrastructure: int
    stall: int
    in_a_row: int = 0
    """Restarts of the job so far that brought no new step: the back-off goes on from there."""
    charged_in_a_row: int = 0
    replaced: int = 0
    """Pods of the attempt that had been replaced by then: where it is higher, it is what was left later."""
    known_of: int = -1
    """Which pod of node 0 the agent had that charged, in place, what is no longer left; -1: none had charged any."""
    known: tuple[int, int, int] = (0, 0, 0)
    """What it had: application, infrastructure, stall."""
    step: int = 0
    """The furthest that the job had come."""
    peers_lost: int = 0
    """Restarts since then for which only complaints about lost peers were found."""


class Budget(NamedTuple):
    """How many restarts in place an agent of node 0 may charge in its life, by what they are charged to, and in all."""

    application: int
    infrastructure: int
    stall: int
    total: int
    in_a_row: int = 0
    charged_in_a_row: int = 0
    peers_lost: int = 0
    most: int | None = None
    """--max-restarts, where it was said."""
    replaced: int = 0
    """As of which replaced pod."""

    @staticmethod
    def of(left: Left, most: int | None) -> Budget:
        """That of an agent that has charged nothing yet."""
        return Budget(0, 0, 0, 0, most=most)._allowing(left, (0, 0, 0))

    def renewed(self, left: Left, replacement: int) -> Budget:
        """With what a newer pod was told, where this is the budget of the agent in that pod of node 0."""
        if left.replaced <= self.replaced:
            return self
        return self._allowing(left, left.known if left.known_of == replacement else (0, 0, 0))

    def _allowing(self, left: Left, charged: tuple[int, int, int]) -> Budget:
        """charged: of what is no longer left, that by this agent itself."""
        in_life = [still + own for still, own in zip(left[:3], charged, strict=True)]
        most = sum(in_life) if self.most is None else self.most
        application, infrastructure, stall = (min(most, number) for number in in_life)
        return self._replace(
            application=application,
            infrastructure=infrastructure,
            stall=stall,
            total=min(most, application + infrastructure + stall),
            in_a_row=left.in_a_row,
            charged_in_a_row=left.charged_in_a_row,
            peers_lost=left.peers_lost,
            replaced=left.replaced,
        )


class PolicyRule(NamedTuple):
    """rules.PolicyRule, which is not imported before ranks run."""

    action: Literal["FailJob", "Ignore", "Count"]
    codes: frozenset[int]
    inverted: bool
