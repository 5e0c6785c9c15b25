"""Finds the namespaces that a release for all namespaces must leave to other releases.

The chart marks what a release watches: with the ConfigMap MARK in each listed namespace, or with one for all
namespaces. Helm refuses to install an object that another release owns. So no two releases watch the same namespace,
and no two watch all of them.

Helm does not refuse a release for all namespaces next to one for a single namespace. The release for all therefore
reads the marks and leaves the marked namespaces alone. Until it sees a new mark, both act, which is harmless: the API
server refuses the second of two conflicting writes (docs/dev/decisions.md).

Anyone who can create ConfigMaps in a namespace can write its mark. So a mark affects only the jobs of its own
namespace, and is not trusted: it may be a megabyte, hold anything as its release, and change every second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client

MARK = api.GROUP
READ_SECONDS = 10.0
RELEASE_MAX = 200
_LOGGER = logging.getLogger("ddpjob_operator")


class OtherReleases:
    """The marks of other releases, read every READ_SECONDS."""

    def __init__(self, client: Client, *, are_known: bool = False) -> None:
        """are_known: True if `run` is not needed, because no other release can serve the same namespaces."""
        self._client, self.are_known = client, are_known
        self._releases: dict[str, str] = {}
        self._logged: set[str] = set()

    def of(self, namespace: str) -> str:
        """Return the other release that has marked this namespace; "" if no release has."""
        return self._releases.get(namespace, "")

    def sentences(self) -> list[str]:
        """Return a sentence for each namespace that is left to another release."""
        return [
            f"the release {release} manages the jobs of the namespace {namespace} (ConfigMap {namespace}/{MARK});"
            " this release leaves them alone"
            for namespace, release in sorted(self._releases.items())
        ]

    async def run(self, changed: Callable[[Set[str]], None]) -> None:
        """Read the marks until cancelled. changed: called with the namespaces whose mark is new or gone."""
        while True:
            before = self._releases.keys()
            try:
                # Select by name, because the role allows only this resourceName.
                pages = self._client.pages("/api/v1/configmaps", field_selector=f"metadata.name={MARK}")
                self._releases = {
                    raw["metadata"]["namespace"]: _release(raw.get("data"))
                    async for page in pages
                    for raw in page.items
                }
                self.are_known = True
            except ApiError as error:
                # 403: an older chart's role lacks the right to read the marks.
                # Without this right, act for all namespaces. Otherwise no release would act for unmarked namespaces.
                self.are_known = self.are_known or error.status == 403
                self._log(
                    {f"marks of other releases cannot be read, so two releases may act on one namespace: {error}"}
                )
            else:
                self._log(set(self.sentences()))
            if moved := before ^ self._releases.keys():
                changed(moved)
            await asyncio.sleep(READ_SECONDS)

    def _log(self, lines: set[str]) -> None:
        for line in sorted(lines - self._logged):
            _LOGGER.warning("%s", line)
        self._logged = lines


def _release(data: object) -> str:
    """Return the release named in a mark, as one line without control characters; "?" if the mark names none."""
    named = data.get("release") if isinstance(data, dict) else None
    return " ".join(clean(str(named or "?")[:RELEASE_MAX]).split()) or "?"
