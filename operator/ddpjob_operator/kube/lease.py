"""Which of several operators acts: the one that holds a Lease, as with client-go's leader election.

`Candidate` decides and has no clock; `Leader` runs it with one. No wall clock is trusted: a Lease is taken
from its holder only when it has not changed for its whole duration by our own monotonic clock, and its holder has
stopped before that by its own.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from dataclasses import dataclass, replace
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, Raw
from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime

API_VERSION = "coordination.k8s.io/v1"
ADDRESS = f"{api.GROUP}/progress-address"
"""Annotation of the Lease: where its holder takes reports of progress, as host:port."""
NEVER = float("-inf")
_ABSENT = ""
"""The version of a Lease that is not there any more."""


@dataclass(frozen=True)
class Durations:
    """client-go's defaults, which every cluster is used to."""

    lease_seconds: int = 15
    """DDPJOB_LEASE_SECONDS: a Lease that has not changed for so long, as another operator sees it, may be taken."""
    renew_seconds: float = 10.0
    """DDPJOB_LEASE_RENEW_SECONDS: its holder stops so long after the start of the last renewal that succeeded."""
    retry_seconds: float = 2.0
    """DDPJOB_LEASE_RETRY_SECONDS: between two reads of it, and between two renewals."""

    @property
    def try_seconds(self) -> float:
        """The time-out of a request: after a renewal two that hang fit in before the holder has to stop."""
        return (self.renew_seconds - self.retry_seconds) / 2


@dataclass(frozen=True)
class Lease:
    """A Lease, cut to what decisions read."""

    version: str
    """Its resourceVersion: another one means that it has changed."""
    holder: str
    """Empty: none."""
    seconds: float
    """What its holder has promised the others to wait; 0: nothing was promised."""
    address: str = ""
    """Where the holder takes reports of progress."""


class Candidate:
    """One operator's view of the Lease. Times are seconds of its own monotonic clock."""

    def __init__(self, identity: str, durations: Durations) -> None:
        self.identity = identity
        self.held_until = NEVER
        """Until when we may act."""
        self.held_since = NEVER
        """Since when without a gap."""
        self.was_there = False
        """Whether it has ever been seen to exist."""
        self._durations = durations
        self._lease: Lease | None = None
        self._changed_at: float | None = None
        self._asked_at = NEVER
        """When we asked for what we have seen last."""
        self._saw_at = NEVER
        """When that arrived."""

    def saw(self, lease: Lease | None, now: float, asked_at: float = NEVER) -> None:
        """The Lease as an answer shows it that arrived `now` and was asked for at `asked_at`, after the one before had
        arrived; None: it does not exist."""
        # One that is absent looks like itself, also where another made and held it between two looks. Who has looked
        # within renew_seconds would have seen it, or its holder has stopped.
        unseen = (lease is None or lease.version == _ABSENT) and now - self._saw_at > self._durations.renew_seconds
        changed = self._changed_at is None or lease != self._lease or unseen
        if changed:
            self._lease, self._changed_at = lease, now
        self.was_there = self.was_there or lease is not None
        if lease is None or lease.holder != self.identity:
            self.held_until = NEVER
        elif changed:
            # Written in our name, by another one that has it or by our own request whose answer was lost, and after
            # we had asked for what we saw before. As others wait from this change on, it is as good as our own write.
            self._hold(self._asked_at, now)
        self._asked_at, self._saw_at = asked_at, now

    def took(self, lease: Lease, asked_at: float, now: float) -> None:
        """Our own write, sent at `asked_at`, was carried out: at some moment between that and `now`."""
        self._lease, self._changed_at, self.was_there = lease, asked_at, True
        self._hold(asked_at, now)
        self._asked_at, self._saw_at = asked_at, now

    def missed(self, now: float) -> None:
        """It is not there `now`. Whoever held it may not know that yet, so this counts as its last change."""
        if self._lease is not None:
            self.saw(replace(self._lease, version=_ABSENT), now)

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether nobody has changed it for so long, as far as we know."""
        return self._changed_at is not None and now - self._changed_at >= seconds

    def may_take(self, now: float) -> bool:
        """Whether to write our name into it: it is ours or free, or its holder has not renewed it for long enough."""
        if self._lease is not None and self._lease.holder in ("", self.identity):
            return True
        # A missing Lease was deleted, because the chart creates it, and its holder may not know that yet.
        return self.is_silent(now, self._wait_seconds())

    def leader(self, now: float) -> Lease | None:
        """The Lease of another operator that acts, as far as we know."""
        lease, changed_at = self._lease, self._changed_at
        if lease is None or changed_at is None or lease.holder in ("", self.identity):
            return None
        return lease if now - changed_at < self._wait_seconds() else None

    def _hold(self, changed_after: float, now: float) -> None:
        if self.held_until <= now:
            self.held_since = now
        self.held_until = max(self.held_until, changed_after + self._durations.renew_seconds)

    def _wait_seconds(self) -> float:
        return (self._lease.seconds if self._lease is not None else 0.0) or self._durations.lease_seconds


class Holder:
    """Takes a Lease on the API server, and renews it."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        durations: Durations,
        address: str = "",
        *,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.what = f"the Lease {namespace}/{name}"
        self._client, self._name, self._address = client, name, address
        self._collection = f"/apis/{API_VERSION}/namespaces/{namespace}/leases"
        self._durations, self._runtime, self._clock = durations, runtime, runtime.clock
        self._candidate = Candidate(identity, durations)
        self._seen: Raw | None = None
        """As it was read or written last; None: it did not exist."""
        self._renewed = asyncio.Event()
        self._logged = ""

    async def renew(self) -> None:
        """One try to take it or to go on holding it; a failure is logged, and the next try comes soon."""
        try:
            await self._read_and_renew()
        except asyncio.TimeoutError:
            self._report("the API server did not answer in time")
        except ApiError as error:
            # 409: another one was quicker, and the next read shows which.
            if error.status != 409:
                self._refused(error)
        else:
            self._report("")

    async def _read_and_renew(self) -> None:
        asked_at = self._clock()
        async with at_most(self._durations.try_seconds):
            raw = self._seen = await self._read()
        self._candidate.saw(None if raw is None else read(raw), self._clock(), asked_at)
        if self._may_take(raw):
            await self._take()

    async def _take(self) -> None:
        """Write our name into what was seen last."""
        identity = self._candidate.identity
        body = claim(self._seen, self._name, identity, self._durations, self._address, self._runtime.utc())
        asked_at = self._clock()
        async with at_most(self._durations.try_seconds):
            written = self._seen = await self._write(self._seen, body)
        self._candidate.took(read(written), asked_at, self._clock())

    def _may_take(self, raw: Raw | None) -> bool:  # noqa: ARG002
        return self._candidate.may_take(self._clock())

    def _refused(self, error: ApiError) -> None:
        self._report(str(error))

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._logged:
            self._runtime.log.warning("%s cannot be read or renewed, trying again: %s", self.what, trouble)
        self._logged = trouble

    async def _read(self) -> Raw | None:
        """As it is; None: it does not exist. Raises ApiError."""
        try:
            return await self._client.get(f"{self._collection}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _write(self, seen: Raw | None, body: Raw) -> Raw:
        """Create it, or replace the one that was seen. Raises ApiError."""
        if seen is None:
            return await self._client.create(self._collection, body)
        return await self._client.replace(f"{self._collection}/{self._name}", body)


class Leader(Holder):
    """Renews the Lease from a task of its own. Others ask `holds` right before they write.

    Its client is for the Lease alone, as the other may not write while we do not hold it.
    """

    _logged_leader = ""

    def holds(self) -> bool:
        """Whether we may write at this moment."""
        return self._clock() < self._candidate.held_until

    def leader_address(self) -> str | None:
        """Where the operator that leads takes reports; empty: none is known. None: this one leads."""
        if self.holds():
            return None
        leader = self._candidate.leader(self._clock())
        return "" if leader is None else leader.address

    async def gained(self) -> None:
        """Returns once the Lease is ours."""
        while not self.holds():
            self._renewed.clear()
            await self._renewed.wait()
        self._runtime.log.info("%s is ours: this operator leads", self.what)

    async def lost(self) -> None:
        """Returns once it is not ours any more, at the moment when the last renewal expires."""
        while (left := self._candidate.held_until - self._clock()) > 0:
            self._renewed.clear()
            try:
                async with at_most(left):
                    await self._renewed.wait()
            except asyncio.TimeoutError:
                continue
        self._runtime.log.warning("%s is lost: this operator stands by", self.what)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = self._clock()
            await self.renew()
            self._renewed.set()
            # Spread, so that those that wait do not all try in the moment in which it becomes free.
            spread = 1.0 if self.holds() else self._runtime.random.uniform(1.0, 1.2)
            # From one begin to the next: an API server that answers slowly leaves no time for a pause.
            await asyncio.sleep(max(0.0, began + self._durations.retry_seconds * spread - self._clock()))

    async def release(self) -> None:
        """Another operator may have it at once. Call it when `run` has ended and nothing is written any more."""
        self._candidate.held_until = NEVER
        try:
            async with at_most(self._durations.try_seconds):
                while not await self._freed():
                    pass
        except (ApiError, asyncio.TimeoutError) as error:
            why = str(error) or "no answer in time"
            self._runtime.log.info("%s was not released, so it runs out: %s", self.what, why)

    async def _freed(self) -> bool:
        """False: a renewal that was under way when `run` ended has arrived between the read and the write."""
        raw = await self._read()
        if raw is None or read(raw).holder != self._candidate.identity:
            return True
        try:
            await self._write(raw, freed(raw, self._runtime.utc()))
        except ApiError as error:
            if error.status != 409:
                raise
            return False
        self._runtime.log.info("%s is released", self.what)
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def _may_take(self, raw: Raw | None) -> bool:
        leader = self._candidate.leader(self._clock())
        holder = "" if leader is None else leader.holder
        if holder and holder != self._logged_leader:
            self._runtime.log.info("%s is held by %s: this operator stands by", self.what, holder)
        self._logged_leader = holder
        return super()._may_take(raw)


def read(raw: Raw) -> Lease:
    """A Lease as candidates see it."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    return Lease(
        version=str(metadata.get("resourceVersion", "")),
        holder=str(spec.get("holderIdentity") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
        address=str((metadata.get("annotations") or {}).get(ADDRESS) or ""),
    )


def claim(raw: Raw | None, name: str, identity: str, durations: Durations, address: str, now: dt.datetime) -> Raw:
    """The Lease with our name in it, on top of what was seen: its resourceVersion lets one of two writers win."""
    metadata, spec = _parts(raw, name)
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ADDRESS: address}
    ours = spec.get("holderIdentity") == identity
    spec |= {
        "holderIdentity": identity,
        "leaseDurationSeconds": durations.lease_seconds,
        "acquireTime": spec.get("acquireTime") if ours else _text(now),
        "renewTime": _text(now),
        "leaseTransitions": (spec.get("leaseTransitions") or 0) + (not ours),
    }
    return _lease(metadata, spec)


def freed(raw: Raw, now: dt.datetime) -> Raw:
    """The Lease without a holder."""
    metadata, spec = _parts(raw, raw["metadata"]["name"])
    metadata["annotations"] = {k: v for k, v in (metadata.get("annotations") or {}).items() if k != ADDRESS}
    return _lease(metadata, {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _text(now)})


def _parts(raw: Raw | None, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = raw or {"metadata": {"name": name}}
    return dict(raw["metadata"]), dict(raw.get("spec") or {})


def _lease(metadata: Raw, spec: Raw) -> Raw:
    return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}


def _text(time_: dt.datetime) -> str:
    """A MicroTime."""
    return time_.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
