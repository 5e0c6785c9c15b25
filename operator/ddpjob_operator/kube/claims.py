"""Which release acts where, so that two of them never act on one job.

The Lease of a release says which of its own pods leads. Another release knows nothing of that Lease, so all pods of a
release also claim what they watch, in the release's name and at a place that every release knows:

- a release with a list of namespaces holds the Lease NAMESPACE_CLAIM in each of them;
- a release for all namespaces holds the Lease ALL_CLAIM in one namespace (kube-system), and leaves alone each one in
  which another release holds NAMESPACE_CLAIM. That release cannot see it, so it waits until it has surely been seen.

A release that finds a claim held stands by there, logs it, and acts by itself once the holder has not renewed for
long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpjob_operator.job import api
from ddpjob_operator.kube import lease
from ddpjob_operator.kube.api.client import ApiError, Client, Raw
from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime
from ddpjob_operator.kube.lease import NEVER, Candidate, Durations

NAMESPACE_CLAIM = api.GROUP
"""Name of the Lease of one namespace."""
ALL_CLAIM = f"all.{api.GROUP}"
"""Name of the Lease of all namespaces."""
SILENT_ROUNDS = 2.5
"""Rounds without a renewal after which a pod that does not lead renews: more than the two of a leader that is well, and
early enough for a renewal before what it knows of has run out."""


@dataclass(frozen=True)
class ClaimName:
    """Where a claim is."""

    namespace: str
    name: str

    @property
    def what(self) -> str:
        """What it claims, in words."""
        return "all namespaces" if self.name == ALL_CLAIM else f"the namespace {self.namespace}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def namespace_of(path: str) -> str:
    """Of a request; empty: of none."""
    return path.partition("/namespaces/")[2].partition("/")[0]


class Claim(lease.Holder):
    """One of these Leases, held in the name of a release.

    The pod that leads renews it. The others read that it is renewed, and write where nobody has done so lately.
    """

    def __init__(
        self,
        client: Client,
        place: ClaimName,
        release: str,
        durations: Durations,
        leads: Callable[[], bool],
        runtime: Runtime,
    ) -> None:
        super().__init__(client, place.namespace, place.name, release, durations, runtime=runtime)
        self.place = place
        self.what = f"the claim {place}"
        self._leads = leads
        self._unguarded = False
        self._takes = 0.0
        """Seconds of the last renewal."""

    def holds(self) -> bool:
        """Whether the release may act there."""
        # A release for all namespaces that has not seen this claim yet, or has seen it expired, may act here until it
        # asks for the claims of others the next time. From then on it sees one that is held without a gap.
        waits = 0.0 if self.place.name == ALL_CLAIM else self._durations.lease_seconds
        return self._unguarded or self._candidate.held_since + waits <= self._clock() < self._candidate.held_until

    def holder(self) -> str:
        """The other release that acts there, as far as we know."""
        other = self._candidate.leader(self._clock())
        return "" if other is None else other.holder

    async def renew(self) -> None:
        """The pod that leads: unless it was renewed lately, and earlier where that takes long. Others read it."""
        began, lately = self._clock(), self._durations.renew_seconds - 2 * self._durations.retry_seconds
        if not self._leads() or self._candidate.held_until - began <= lately + self._takes:
            await super().renew()
            self._takes = self._clock() - began

    async def _read_and_renew(self) -> None:
        is_ours = self._leads() and self._is_ours()
        try:
            # One answer where it is ours, and not two as with a read before.
            await (self._take() if is_ours else super()._read_and_renew())
        except ApiError as error:
            if error.status != 409 and not (is_ours and error.status == 404):
                raise
            # Somebody has changed it, mostly another pod of the release, or deleted it.
            await super()._read_and_renew()

    def _is_ours(self) -> bool:
        return self._seen is not None and lease.read(self._seen).holder == self._candidate.identity

    def _refused(self, error: ApiError) -> None:
        # An older chart gives no right to it, and jobs on which nobody acts would be worse.
        self._unguarded = self._unguarded or error.status == 403
        blind = f"; this operator acts on {self.place.what} and cannot see whether another one does"
        self._report(f"{error}{blind if error.status == 403 else ''}")

    def _report(self, trouble: str) -> None:
        self._unguarded = self._unguarded and trouble != ""
        super()._report(trouble)

    def _may_take(self, raw: Raw | None) -> bool:
        # One that never existed is created at once; the holder of one that was deleted may not know that yet.
        if raw is None and not self._candidate.was_there:
            return True
        # Two pods that write take each other's resourceVersion, and a slow answer leaves no time for another try.
        lately = SILENT_ROUNDS * self._durations.retry_seconds
        return (self._leads() or self._candidate.is_silent(self._clock(), lately)) and super()._may_take(raw)


class Claims:
    """All claims of a release. Each of its pods runs them, so that a new leader finds them held; others ask `hold`
    right before they write."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str],
        everywhere: str,
        release: str,
        durations: Durations,
        *,
        leads: Callable[[], bool] = lambda: True,
        runtime: Runtime = SYSTEM,
    ) -> None:
        """namespaces: those that are watched; none: all. everywhere: the namespace of the claim for all of them. leads:
        whether this pod leads its release, which saves writes; claims are safe whatever it says."""
        places = [ClaimName(name, NAMESPACE_CLAIM) for name in namespaces] or [ClaimName(everywhere, ALL_CLAIM)]
        self._client, self._release, self._durations = client, release, durations
        self._clock, self._runtime = runtime.clock, runtime
        claims = [Claim(client, place, release, durations, leads, runtime) for place in places]
        self._claims = {claim.place.namespace if namespaces else "": claim for claim in claims}
        self._others: dict[str, Candidate] = {}
        """Of a release for all namespaces: the namespaces with a claim of their own."""
        self._asked_at = NEVER
        self._unguarded = False
        self._logged: set[str] = set()

    def hold(self, namespace: str) -> bool:
        """Whether this release may act on the jobs of a namespace at this moment."""
        everywhere = self._claims.get("")
        if everywhere is None:
            return namespace in self._claims and self._claims[namespace].holds()
        return everywhere.holds() and self._is_fresh() and not self._holder_of(namespace)

    def another_acts(self, namespace: str) -> bool:
        """Whether another release acts there, as far as we know. Where this one may not act and no other one does, it
        is only its own claim, or its view of others', that has lapsed: mostly for seconds, unnoticed by `run`."""
        claim = self._claims.get("", self._claims.get(namespace))
        return bool((claim is not None and claim.holder()) or self._holder_of(namespace))

    def standing_by(self) -> list[str]:
        """A sentence for each place in which another release acts."""
        claimed = [(claim.place, claim.holder()) for claim in self._claims.values()]
        claimed += [(ClaimName(n, NAMESPACE_CLAIM), self._holder_of(n)) for n in self._others]
        return [
            f"the jobs of {place.what} are the release {holder}'s (Lease {place}); this one leaves them alone"
            f" until {self._durations.lease_seconds} s have passed without a renewal"
            for place, holder in claimed
            if holder
        ]

    async def run(self, changed: Callable[[], None]) -> None:
        """Until cancelled. changed: called when what may be acted on is another set than before."""
        before: object = None
        while True:
            began = self._clock()
            others = [self._read_other_claims()] if "" in self._claims else []
            await asyncio.gather(*(claim.renew() for claim in self._claims.values()), *others)
            self._log_who_acts()
            now = (
                [name for name, claim in self._claims.items() if claim.holds()],
                self._is_fresh(),
                sorted(filter(self._holder_of, self._others)),
            )
            if now != before:
                before = now
                changed()
            # From one begin to the next: an API server that answers slowly leaves no time for a pause.
            await asyncio.sleep(max(0.0, began + self._durations.retry_seconds - self._clock()))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def _is_fresh(self) -> bool:
        """Whether the claims of others were read lately; a release with a list of namespaces need not."""
        return self._unguarded or self._clock() < self._asked_at + self._durations.renew_seconds

    def _holder_of(self, namespace: str) -> str:
        other = self._others.get(namespace)
        # As of when we asked last: it may have been renewed since, and waits only for those who asked before that.
        live = None if other is None else other.leader(self._clock() if self._unguarded else self._asked_at)
        return "" if live is None else live.holder

    async def _read_other_claims(self) -> None:
        asked_at = self._clock()
        try:
            async with at_most(self._durations.try_seconds):
                # By this one name, because a right can be limited to it.
                found = await self._client.get(
                    f"/apis/{lease.API_VERSION}/leases", {"fieldSelector": f"metadata.name={NAMESPACE_CLAIM}"}
                )
        except asyncio.TimeoutError:
            return
        except ApiError as error:
            if error.status == 403 and not self._unguarded:
                self._unguarded = True
                self._runtime.log.warning(
                    "releases that watch one namespace alone cannot be seen, and would act beside us: %s", error
                )
            return
        self._unguarded = False
        self._asked_at = asked_at
        raws = {raw["metadata"]["namespace"]: raw for raw in found.get("items") or ()}
        for namespace in raws.keys() | self._others.keys():
            other = self._others.setdefault(namespace, Candidate(self._release, self._durations))
            if namespace in raws:
                other.saw(lease.read(raws[namespace]), self._clock())
            else:
                other.missed(self._clock())

    def _log_who_acts(self) -> None:
        lines = set(self.standing_by())
        for line in sorted(lines - self._logged):
            self._runtime.log.warning("%s", line)
        if self._logged and not lines:
            self._runtime.log.info("no other release acts on the namespaces that are watched by this one")
        self._logged = lines
