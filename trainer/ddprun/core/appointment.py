"""Parse the operator's answer to the question which agent leads the group."""

from __future__ import annotations

import json
from typing import NamedTuple

from ddpjob_core.budget import Grant, natural
from ddpjob_core.members import Members


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
    places: Members | None = None
    """Nodes that have started and are not lost; None if nobody has answered yet."""

    def survivors(self, members: Members, *, has_spares: bool = False) -> set[int]:
        """Return the nodes that may still come: members of an earlier leader's generation without that leader, and
        spares, one of which takes its place. Omit nodes that are lost or not wanted any more."""
        if has_spares and members and self.places is not None:
            return set(self.places)
        return {place for place in members[1:] if self.places is None or place in self.places}

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
            places = Members.read(values["places"]) if values.get("places") else None
            return Appointment(term, place, str(values["host"]), port, grant, places)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"no appointment: {text[:100]!r}") from None
