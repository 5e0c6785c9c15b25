"""Parse the operator's answer to the question which agent leads the group."""

from __future__ import annotations

import json
from typing import NamedTuple

from ddpjob_core.budget import Grant, natural


class Appointment(NamedTuple):
    """The leader of one term. A term lasts until the operator appoints another leader."""

    term: int
    """1 for the first leader of an attempt, which is node 0; 0 if the leader is not known yet."""
    place: int
    host: str
    port: int | None
    """Port of the leader's agent."""
    grant: Grant | None = None
    """Restarts that were left when the operator answered; at first those of the pod's environment."""

    def replaces(self, known: Appointment) -> bool:
        """True for a later term: requests may be answered out of order, and an operator may have an old status."""
        return self.term > known.term

    @staticmethod
    def read(text: bytes) -> Appointment:
        """Parse an answer. Raise ValueError."""
        try:
            values = json.loads(text)
            grant = Grant.read(json.dumps(values["left"])) if values.get("left") else None
            term, place, port = (natural(values[name]) for name in ("term", "place", "port"))
            return Appointment(term, place, str(values["host"]), port, grant)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"no appointment: {text[:100]!r}") from None
