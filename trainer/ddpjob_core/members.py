"""The members of a generation: the pods that take part in it, and the ranks of each pod.

A pod's number is its *place*. It is in the pod's name, and a replacement pod has the same place. Node ranks and ranks
number the members of one generation from 0 without gaps. Convert them with `Members`, because place and node rank are
equal only if all places take part in order.
"""

from __future__ import annotations

LEADER_PATH = "/v1/leader"
"""Path at the status receiver where the agents of an elastic job ask who leads."""
NPROC_MAX = 1024
"""Maximum number of ranks of one node; no machine needs more."""


class Members(tuple[int, ...]):
    """The places (numbers) of the pods of one generation, in the order of their node ranks."""

    __slots__ = ()

    @classmethod
    def read(cls, text: str) -> Members:
        """Parse the result of `text`. Raises ValueError."""
        runs = (run.partition("-") for run in text.split(","))
        return cls(place for first, _, last in runs for place in range(int(first), int(last or first) + 1))

    @property
    def text(self) -> str:
        """Return the places as ranges, such as 0-3,7, so that 99,999 places fit into a line of the agents' protocol."""
        runs: list[list[int]] = []
        for place in self:
            if runs and place == runs[-1][-1] + 1:
                runs[-1] = [runs[-1][0], place]
            else:
                runs.append([place])
        return ",".join("-".join(map(str, run)) for run in runs)

    @property
    def leader(self) -> int:
        """Place of node rank 0, where rank 0 and the leading agent run."""
        return self[0]

    def node_rank(self, place: int) -> int:
        """Return the node rank of a place. Raises ValueError if it is not a member."""
        # Fast path: all places take part in order, so the place is the node rank.
        if 0 <= place < len(self) and self[place] == place:
            return place
        return self.index(place)

    def place(self, node_rank: int | None) -> int | None:
        """Return the place of a node rank; None if there is no such node rank."""
        return self[node_rank] if node_rank is not None and 0 <= node_rank < len(self) else None

    def ranks(self, place: int, nproc: int) -> range:
        """Return the ranks at a place. Raise ValueError if the place is not a member."""
        first = self.node_rank(place) * nproc
        return range(first, first + nproc)

    def place_of_rank(self, rank: int, nproc: int) -> int | None:
        """Return the place where a rank runs; None if there is no such rank."""
        return self.place(rank // nproc)

    def world_size(self, nproc: int) -> int:
        """Return the number of ranks of the generation."""
        return len(self) * nproc
