"""The namespaces that a release for all namespaces leaves to others.

The chart marks what a release watches: with the ConfigMap MARK in each namespace of its list, or with one for all
namespaces. Helm refuses an object that another release owns, so no two releases watch the same namespace, or all. A
release for all namespaces is not refused by a mark in one of them. It reads these marks, and leaves those namespaces
alone. For the seconds in which it has not seen a new one both act, which is harmless: each write is refused if another
one came first (docs/dev/decisions.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import SYSTEM, Runtime

MARK = api.GROUP
READ_SECONDS = 10.0


class OtherReleases:
    """The marks of others, by namespace."""

    def __init__(self, client: Client, runtime: Runtime = SYSTEM) -> None:
        self._client, self._runtime = client, runtime
        self.are_known = False
        self._releases: dict[str, str] = {}
        self._logged: set[str] = set()

    def of(self, namespace: str) -> str:
        """The release that watches this namespace alone; empty: none."""
        return self._releases.get(namespace, "")

    def sentences(self) -> list[str]:
        """One for each namespace that is left alone."""
        return [
            f"the jobs of the namespace {namespace} are the release {release}'s (ConfigMap {namespace}/{MARK});"
            " this one leaves them alone"
            for namespace, release in sorted(self._releases.items())
        ]

    async def run(self, changed: Callable[[], None]) -> None:
        """Until cancelled. changed: called when others watch other namespaces than before."""
        while True:
            before = self.are_known, self._releases
            try:
                self._releases = await self._read()
                self.are_known = True
            except ApiError as error:
                # With the role of an older chart. Jobs for which nobody acts would be worse.
                self.are_known = self.are_known or error.status == 403
                self._log({f"releases that watch one namespace alone cannot be seen, and would act here too: {error}"})
            else:
                self._log(set(self.sentences()))
            if before != (self.are_known, self._releases):
                changed()
            await asyncio.sleep(READ_SECONDS)

    async def _read(self) -> dict[str, str]:
        # By this one name, because a right can be limited to it.
        found = await self._client.get("/api/v1/configmaps", {"fieldSelector": f"metadata.name={MARK}"})
        return {
            raw["metadata"]["namespace"]: str((raw.get("data") or {}).get("release"))[:200] for raw in found["items"]
        }

    def _log(self, lines: set[str]) -> None:
        for line in sorted(lines - self._logged):
            self._runtime.log.warning("%s", line)
        self._logged = lines
