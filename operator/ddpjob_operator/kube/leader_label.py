"""Labels the pod of the leader. The Service of the receiver selects this label, so reports reach only the leader."""

from __future__ import annotations

import asyncio

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError, Client, collection
from ddpjob_operator.kube.api.runtime import LogOnce, Runtime

LABEL = f"{api.GROUP}/leader"
AGAIN_SECONDS, FORBIDDEN_SECONDS = 2.0, 30.0


class LeaderLabel:
    """Sets and removes the pods' leader label. client: may write without the Lease."""

    def __init__(self, client: Client, namespace: str, pod: str, runtime: Runtime) -> None:
        self._client, self._path, self._pod = client, collection("pods", namespace), pod
        self._leads = asyncio.Event()
        self._former = ""
        self._log = LogOnce(runtime.log.warning)

    def take_from(self, former: str) -> None:
        """Label this pod as the leader. former: the earlier leader's pod, which may hang; "" if unknown."""
        self._former = former if former != self._pod else ""
        self._leads.set()

    async def run(self) -> None:
        """Keep the label on the leader's pod correct until cancelled."""
        # Remove the label first: if this container was restarted while it led, its pod still has the label.
        await self._set(self._pod, None)
        await self._leads.wait()
        await asyncio.gather(self._set(self._pod, "true"), self._set(self._former, None))
        await asyncio.Event().wait()

    async def _set(self, pod: str, value: str | None) -> None:
        while pod and (wait := await self._tried(pod, value)):
            await asyncio.sleep(wait)

    async def _tried(self, pod: str, value: str | None) -> float:
        """Try once to set the label. Return the seconds until the next try; 0 if it succeeded or the pod is gone."""
        try:
            await self._client.patch(f"{self._path}/{pod}", {"metadata": {"labels": {LABEL: value}}})
        except ApiError as error:
            if error.status == 404:
                return 0.0
            self._log(f"progress reports may not arrive, because the label {LABEL} was not set: {error}")
            return FORBIDDEN_SECONDS if error.status == 403 else AGAIN_SECONDS
        return 0.0
