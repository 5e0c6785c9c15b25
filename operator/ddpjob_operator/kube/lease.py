"""Leader election: of several operators, only the one that holds a Lease acts.

In: the API server's answers about one Lease. Out: `holds()`, which the client checks right before each try of a write.
After `gained` the Operator starts its queue, after `lost` it ends. `Candidate` decides and takes times as arguments;
`Election` sends the requests and has the clock. The chart creates the Lease; we create it only if somebody has deleted
it, and never delete it.

The algorithm is that of client-go (tools/leaderelection/leaderelection.go), with the same defaults. No wall clock is
trusted. A candidate takes the Lease only when it has not changed for its whole duration, by the candidate's monotonic
clock. The holder has stopped before that, by its own monotonic clock, because renew_seconds is less than lease_seconds.

Different from client-go: the time to act counts from when a request was sent, not from its answer. A candidate treats a
deleted Lease as if it were still held. A write whose answer was lost counts once the next read shows it.

As in client-go there is no fencing: a write sent just before the Lease expires may arrive after another operator leads.
Preconditions (uid, resourceVersion) and fixed names of pods protect against that, not the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from dataclasses import dataclass
from typing import Any

from ddpjob_operator.kube.api.client import ApiError, Client, Raw
from ddpjob_operator.kube.api.limit import at_most
from ddpjob_operator.kube.api.runtime import SYSTEM, LogOnce, Runtime

API_VERSION = "coordination.k8s.io/v1"
NEVER = float("-inf")


@dataclass(frozen=True)
class Durations:
    """Durations of the election, with client-go's defaults."""

    lease_seconds: int = 15
    """DDPJOB_LEASE_SECONDS: another operator may take a Lease that it has not seen change for this many seconds."""
    renew_seconds: float = 10.0
    """DDPJOB_LEASE_RENEW_SECONDS: the holder stops this many seconds after it sent its last successful renewal."""
    retry_seconds: float = 2.0
    """DDPJOB_LEASE_RETRY_SECONDS: seconds between two reads of the Lease, and between two renewals."""

    @property
    def try_seconds(self) -> float:
        """Time-out of one request. After a renewal, two requests may hang before the holder has to stop."""
        return (self.renew_seconds - self.retry_seconds) / 2


@dataclass(frozen=True)
class Lease:
    """A Lease, cut to the fields that decisions read."""

    version: str
    """resourceVersion of the Lease."""
    holder: str
    """Identity of the operator that holds the Lease; "" if there is none."""
    seconds: float
    """How long others wait after the last change, by its holder's settings; 0 if unset."""


class Candidate:
    """One operator's view of the Lease. Times are seconds of its monotonic clock."""

    def __init__(self, identity: str, durations: Durations) -> None:
        self.identity = identity
        self.held_until = NEVER
        """Until when this operator may act."""
        self._durations = durations
        self._lease: Lease | None = None
        self._changed_at: float | None = None
        self._asked_at = NEVER
        """When the last answered request was sent."""
        self._saw_at = NEVER
        """When the last answer arrived."""

    def saw(self, lease: Lease | None, now: float, asked_at: float = NEVER) -> None:
        """Record the answer to a read: the Lease, or None if it does not exist.

        now: when the answer arrived. asked_at: when the read was sent, which was after the previous answer.
        """
        # Two reads that find no Lease look equal, even if another operator held a Lease in between.
        # After renew_seconds without a read another holder is possible, so the wait starts again.
        unseen = lease is None and now - self._saw_at > self._durations.renew_seconds
        changed = self._changed_at is None or lease != self._lease or unseen
        if changed:
            self._lease, self._changed_at = lease, now
        if lease is None or lease.holder != self.identity:
            self.held_until = NEVER
        elif changed:
            # The Lease names us and has changed: our own write lost its answer, or another process has our identity.
            # The change came after the previous read was sent, so counting from the time of that read is safe.
            self._hold(self._asked_at)
        self._asked_at, self._saw_at = asked_at, now

    def took(self, lease: Lease, asked_at: float, now: float) -> None:
        """Record our own successful write, sent at `asked_at` and answered by `now`."""
        self._lease, self._changed_at = lease, asked_at
        self._hold(asked_at)
        self._asked_at, self._saw_at = asked_at, now

    def may_take(self, now: float) -> bool:
        """True if the Lease is ours or free, or its holder has not renewed it for its whole duration."""
        if self._lease is not None and self._lease.holder in ("", self.identity):
            return True
        # The chart creates the Lease, so a missing Lease was deleted. Its holder may not know that yet, so wait.
        return self._changed_at is not None and now - self._changed_at >= self._wait_seconds()

    def leader(self, now: float) -> str:
        """Return the other operator that holds the Lease; "" if nobody holds it or it has expired."""
        lease, changed_at = self._lease, self._changed_at
        if lease is None or changed_at is None or lease.holder == self.identity:
            return ""
        return lease.holder if now - changed_at < self._wait_seconds() else ""

    def _hold(self, changed_after: float) -> None:
        self.held_until = max(self.held_until, changed_after + self._durations.renew_seconds)

    def _wait_seconds(self) -> float:
        return (self._lease.seconds if self._lease is not None else 0.0) or self._durations.lease_seconds


class Election:
    """Takes and renews the Lease in a task of its own. Callers check `holds` right before each write.

    `client` may write without the Lease; it also sets the label of the leader.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        durations: Durations,
        *,
        runtime: Runtime = SYSTEM,
    ) -> None:
        self.what = f"the Lease {namespace}/{name}"
        self.client, self._name = client, name
        self._collection = f"/apis/{API_VERSION}/namespaces/{namespace}/leases"
        self._durations, self._runtime, self._clock = durations, runtime, runtime.clock
        self._candidate = Candidate(identity, durations)
        self._seen: Raw | None = None
        """The Lease as last read or written; None if it did not exist."""
        self._former = ""
        """Holder from whom we took it."""
        self._renewed = asyncio.Event()
        self._log_trouble, self._log_leader = LogOnce(runtime.log.warning), LogOnce(runtime.log.info)

    async def renew(self) -> None:
        """Try once to take or renew the Lease. A failure is logged, and the next try comes soon."""
        try:
            asked_at = self._clock()
            async with at_most(self._durations.try_seconds):
                raw = self._seen = await self._read()
            self._candidate.saw(None if raw is None else read(raw), self._clock(), asked_at)
            holder = self._candidate.leader(self._clock())
            self._log_leader(f"{self.what} is held by {holder}: this operator stands by" if holder else "")
            if self._candidate.may_take(self._clock()):
                await self._take()
        except asyncio.TimeoutError:
            self._report("the API server did not answer in time")
        except ApiError as error:
            # 409: another operator was faster; the next read shows which.
            if error.status != 409:
                self._report(str(error))
        else:
            self._report("")

    async def _take(self) -> None:
        identity = self._candidate.identity
        holder = "" if self._seen is None else read(self._seen).holder
        body = claim(self._seen, self._name, identity, self._durations, self._runtime.utc())
        asked_at = self._clock()
        async with at_most(self._durations.try_seconds):
            written = self._seen = await self._write(self._seen, body)
        self._candidate.took(read(written), asked_at, self._clock())
        if holder != identity:
            self._former = holder

    def _report(self, trouble: str) -> None:
        self._log_trouble(trouble and f"{self.what} cannot be read or renewed, trying again: {trouble}")

    async def _read(self) -> Raw | None:
        """Return the Lease; None if no Lease exists. Raise ApiError."""
        try:
            return await self.client.get(f"{self._collection}/{self._name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _write(self, seen: Raw | None, body: Raw) -> Raw:
        """Create the Lease if `seen` is None, else replace it. Raise ApiError."""
        if seen is None:
            return await self.client.create(self._collection, body)
        return await self.client.replace(f"{self._collection}/{self._name}", body)

    def holds(self) -> bool:
        """True if this operator may write now."""
        return self._clock() < self._candidate.held_until

    async def gained(self) -> str:
        """Wait until the Lease is ours. Return who held it before, "" if it was free or released."""
        while not self.holds():
            self._renewed.clear()
            await self._renewed.wait()
        self._runtime.log.info("%s is ours: this operator leads", self.what)
        return self._former

    async def lost(self) -> None:
        """Wait until the last renewal expires."""
        while (left := self._candidate.held_until - self._clock()) > 0:
            self._renewed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                async with at_most(left):
                    await self._renewed.wait()
        self._runtime.log.warning("%s is lost, so this operator ends: another one may lead", self.what)

    async def run(self) -> None:
        while True:
            began = self._clock()
            await self.renew()
            self._renewed.set()
            # Add jitter, as client-go's JitterFactor does, so that waiting operators do not all try at the same moment.
            spread = 1.0 if self.holds() else self._runtime.random.uniform(1.0, 1.2)
            # Count from the beginning of the try. A pause after a slow answer would use up the time to renew.
            await asyncio.sleep(max(0.0, began + self._durations.retry_seconds * spread - self._clock()))

    async def release(self) -> None:
        """Let another operator take the Lease at once. `run` must have ended, and nothing may write afterwards."""
        self._candidate.held_until = NEVER
        try:
            async with at_most(self._durations.try_seconds):
                while not await self._freed():
                    pass
        except (ApiError, asyncio.TimeoutError) as error:
            why = str(error) or "no answer in time"
            self._runtime.log.info("%s was not released, so it runs out: %s", self.what, why)

    async def _freed(self) -> bool:
        """Try once to release. Return False if a renewal in flight changed the Lease between our read and write."""
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
        await self.client.close()


def read(raw: Raw) -> Lease:
    """Return the fields of a Lease on which candidates base their decisions."""
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    return Lease(
        version=str(metadata.get("resourceVersion", "")),
        holder=str(spec.get("holderIdentity") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
    )


def claim(raw: Raw | None, name: str, identity: str, durations: Durations, now: dt.datetime) -> Raw:
    """Return the seen Lease with our identity. If two operators write, its resourceVersion lets only one succeed."""
    spec = {} if raw is None else raw.get("spec") or {}
    ours = spec.get("holderIdentity") == identity
    return _lease(
        raw or {"metadata": {"name": name}},
        holderIdentity=identity,
        leaseDurationSeconds=durations.lease_seconds,
        acquireTime=spec.get("acquireTime") if ours else _text(now),
        renewTime=_text(now),
        leaseTransitions=(spec.get("leaseTransitions") or 0) + (not ours),
    )


def freed(raw: Raw, now: dt.datetime) -> Raw:
    """Return the Lease without a holder, and with 1 s to wait, as client-go's release() writes it."""
    return _lease(raw, holderIdentity="", leaseDurationSeconds=1, renewTime=_text(now))


def _lease(raw: Raw, **changes: Any) -> Raw:
    spec = {**(raw.get("spec") or {}), **changes}
    return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": raw["metadata"], "spec": spec}


def _text(time_: dt.datetime) -> str:
    """Return a time as a MicroTime."""
    return time_.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
