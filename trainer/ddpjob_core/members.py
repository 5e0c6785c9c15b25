"""The members of a generation: which pods take part in it, and which ranks each of them has.

The number of a pod is its *place*: it is in the pod's name, and a new pod in its place has the same one. Rank and node
rank count the members of one generation from 0 without gaps. They are taken from here, because a place follows from
them, or they from a place, only as long as all places take part in order.
"""

from __future__ import annotations

NPROC_MAX = 1024
"""Ranks of one node: no machine has more GPUs or is worth more processes."""


class Members(tuple[int, ...]):
    """The places of the pods of one generation, in the order of their node ranks."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str) -> Members:
        """What `text` has written. Raises ValueError."""
        runs = (run.partition("-") for run in text.split(","))
        return cls(place for first, _, last in runs for place in range(int(first), int(last or first) + 1))

    @property
    def text(self) -> str:
        """0-3,7: as ranges, so that the places of 99,999 pods fit into one line between agents."""
        runs: list[list[int]] = []
        for place in self:
            if runs and place == runs[-1][-1] + 1:
                runs[-1] = [runs[-1][0], place]
            else:
                runs.append([place])
        return ",".join("-".join(map(str, run)) for run in runs)

    @property
    def leader(self) -> int:
        """The place of node rank 0: rank 0 runs there, and the agent that leads the others."""
        return self[0]

    def node_rank(self, place: int) -> int:
        """The node rank of a place. Raises ValueError where it is not a member."""
        # If all places take part in order, nothing needs to be searched.
        if 0 <= place < len(self) and self[place] == place:
            return place
        return self.index(place)

    def place(self, node_rank: int | None) -> int | None:
        """The place of a node rank; None where there is none."""
        return self[node_rank] if node_rank is not None and 0 <= node_rank < len(self) else None

    def ranks(self, place: int, nproc: int) -> range:
        """The ranks of a place. Raises ValueError where it is not a member."""
        first = self.node_rank(place) * nproc
        return range(first, first + nproc)

    def place_of_rank(self, rank: int, nproc: int) -> int | None:
        """The place where a rank runs; None where there is no such rank."""
        return self.place(rank // nproc)

    def world_size(self, nproc: int) -> int:
        """Ranks of the whole generation."""
        return len(self) * nproc
