"""The methods and errors of kube.client.Client, answered at once by the model of an API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from model_api import ModelApi, Raw

from ddpjob_operator.kube.api.api_error import of_status
from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import Page, RequestLimits


class DirectClient:
    """A connection without delays and faults. There is no kubelet, so a deleted pod disappears at once."""

    def __init__(self, api: ModelApi, actor: str = "operator") -> None:
        self.limits = RequestLimits()
        self.availability = Availability()
        self.api, self.actor = api, actor

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Raw:
        return await self.request("GET", path, params)

    async def create(self, path: str, body: Raw, params: Mapping[str, str] | None = None) -> Raw:
        return await self.request("POST", path, params, body)

    async def replace(self, path: str, body: Raw, params: Mapping[str, str] | None = None) -> Raw:
        return await self.request("PUT", path, params, body)

    async def patch(self, path: str, body: Raw) -> Raw:
        return await self.request("PATCH", path, None, body)

    async def delete(self, path: str, options: Raw) -> Raw:
        return await self.request("DELETE", path, None, {**options, "gracePeriodSeconds": 0})

    async def list(self, path: str, selector: str = "") -> tuple[list[Raw], str]:
        answer = await self.request("GET", path, {"labelSelector": selector} if selector else {})
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def pages(self, path: str, selector: str = "") -> AsyncIterator[Page]:
        yield Page(*await self.list(path, selector))

    async def close(self) -> None:
        pass

    async def request(self, method: str, path: str, params: Mapping[str, str] | None, body: Raw | None = None) -> Raw:
        return self.answer(method, path, params, body)

    def answer(self, method: str, path: str, params: Mapping[str, str] | None, body: Raw | None = None) -> Raw:
        """Return the server's answer. Raise ApiError."""
        code, answer = self.api.request(method, path, params, body, self.actor)
        if code >= 400:
            raise of_status(answer)
        return answer

    def send(self, *_: Any) -> None:
        """Ignore Events."""
