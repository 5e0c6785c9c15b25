"""The operator's connection to the model API server, with all faults of a connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from direct_client import DirectClient
from faults import Faults
from model_api import ModelApi, Raw, event_of, matching, parse
from virtual_time import VirtualLoop

from ddpjob_operator.job import api as types
from ddpjob_operator.kube.api.api_error import NO_ANSWER, ApiError, of_status

LATENCY_SECONDS = (0.002, 0.03)
TIME_OUT_SECONDS = 30.0
# Number of versions by which a stale server may be behind.
STALE_VERSIONS_MAX = 25


class ModelClient(DirectClient):
    """The connection of one operator process. `crash` kills that process, which then never gets a pending answer."""

    def __init__(self, api: ModelApi, loop: VirtualLoop, faults: Faults, actor: str, crash: Callable[[], None]) -> None:
        super().__init__(api, actor)
        self.dead = False
        self.stale_by = 0
        """How many changes a stale list is behind; 0: a number from the seed."""
        self.away = False
        """True if this process cannot reach the API server."""
        self.requests = 0
        self.writes = 0
        self.may_write: Callable[[], bool] = lambda: True
        """Called right before a write is sent, as in Client."""
        self.on_event: Callable[[Raw], None] = lambda body: None
        """Called with each Event. Events have no faults, because no decision depends on them."""
        self.on_shown: Callable[[Raw], None] = lambda raw: None
        """Called with each object that this process got by a list or a watch."""
        self._loop, self._faults, self._crash = loop, faults, crash
        self._random = random.Random(f"{faults.seed} {actor}")

    async def create(self, path: str, body: Raw, params: Mapping[str, str] | None = None) -> Raw:
        if "/authorization.k8s.io/" in path:
            return self.api.request("POST", path, params, body, self.actor)[1]
        if path.endswith("/events"):
            self.on_event(body)
            return body
        return await super().create(path, body, params)

    async def delete(self, path: str, options: Raw) -> Raw:
        return await self.request("DELETE", path, None, options)

    async def list(self, path: str, selector: str = "") -> tuple[list[Raw], str]:
        # Only a reflector's list may be stale; the list for one job is always current.
        items, version = await super().list(path, selector)
        if "=" not in selector and self._faults.at("list") == "stale":
            plural, namespace, _, _ = parse(path)
            items, version = self._stale(plural, matching(selector, namespace))
        for raw in items:
            self.on_shown(raw)
        return items, version

    def _stale(self, plural: str, matches: Callable[[Raw], bool]) -> tuple[list[Raw], str]:
        """Return the list of a stale server, and its version."""
        log = self.api.log[plural]
        behind = self.stale_by or int(self._faults.number("list", 1, STALE_VERSIONS_MAX))
        version = log[-behind - 1].version if behind < len(log) else self.api.first_version
        return [raw for raw in self.api.at_version(plural, version) if matches(raw)], str(version)

    async def watch(self, path: str, resource_version: str, selector: str = "") -> AsyncIterator[Raw]:
        plural, namespace, _, _ = parse(path)
        matches = matching(selector, namespace)
        version = int(resource_version or 0)
        point = f"watch.{plural}"
        end = self._loop.time() + self._random.uniform(240, 480)
        self._check_served(plural)
        while True:
            await self._reachable("GET", path)
            change = self.api.after(plural, version)
            if change is None:
                if not await self._news(plural, end):
                    return
                continue
            version = change.version
            event = event_of(change, matches)
            if event is None:
                continue
            fault = self._faults.at(point)
            lag = self._faults.number(point, 2, 120) if fault == "late" else self._random.uniform(0.001, 0.05)
            await asyncio.sleep(max(0.0, change.at + lag - self._loop.time()))
            if fault in ("broken", "error", "gone"):
                await self._reachable("GET", path)
                if fault == "broken":
                    return
                raise of_status({"code": 410 if fault == "gone" else 500, "reason": "Expired", "message": "model"})
            if self.dead:
                await self._for_ever()
            if fault == "never":
                continue
            self.on_shown(event["object"])
            yield event
            if fault == "twice":
                yield event

    def _check_served(self, plural: str) -> None:
        if not self.api.serves(plural):
            raise of_status({"code": 404, "reason": "NotFound", "message": "the server could not find the resource"})

    async def _news(self, plural: str, end: float) -> bool:
        """Wait for a change; return False at the end of the stream."""
        waiting = self._loop.create_future()
        timer = self._loop.call_at(end, _wake, waiting, False)
        self.api.waiting[plural].append(waiting)
        try:
            return bool(await waiting)
        finally:
            timer.cancel()

    async def request(self, method: str, path: str, params: Mapping[str, str] | None, body: Raw | None = None) -> Raw:
        self.requests += 1
        writes = method != "GET"
        if writes and not self.may_write():
            raise ApiError(NO_ANSWER, "NotLeading", f"{method} {path}: not sent")
        await asyncio.sleep(self._random.uniform(*LATENCY_SECONDS))
        await self._reachable(method, path)
        point = "write" if writes else "read"
        fault = self._faults.at(point)
        if fault:
            await self._before(fault, point, method, path)
        self.writes += writes
        if fault == "slow":
            code, answer = await self._later(self._faults.number(point, 0.1, 20), method, path, params, body)
        else:
            code, answer = self.api.request(method, path, params, body, self.actor)
        if fault:
            await self._after(fault, point, method, path)
        if self.dead:
            await self._for_ever()
        if code >= 400:
            raise of_status(answer)
        return answer

    async def _before(self, fault: str, point: str, method: str, path: str) -> None:
        if fault == "crash before":
            await self._die()
        if fault == "error":
            raise ApiError(500, "InternalError", "made by the model")
        if fault == "throttled":
            raise ApiError(429, "TooManyRequests", "made by the model", 1.0)
        if fault == "not carried out":
            await asyncio.sleep(TIME_OUT_SECONDS if self._faults.number(point, 0, 1) < 0.5 else 0)
            raise ApiError(NO_ANSWER, "NoAnswer", f"{method} {path}: made by the model")
        if fault == "touched":
            for raw in self.api.all(types.PLURAL):
                touched = {"annotations": {"touched": str(self.api.version)}}
                self.api.change(types.PLURAL, raw, "user", metadata=touched)

    async def _later(self, seconds: float, *request: Any) -> tuple[int, Raw]:
        """Execute a request later, even if the process that sent it has died."""
        answer = self._loop.create_future()

        def carry_out() -> None:
            found = self.api.request(*request, self.actor)
            if found[0] == 201 and (self.dead or not self.may_write()):
                self.api.late.add(found[1]["metadata"]["uid"])
            if not answer.done():
                answer.set_result(found)

        self._loop.call_later(seconds, carry_out)
        found: tuple[int, Raw] = await answer
        return found

    async def _after(self, fault: str, point: str, method: str, path: str) -> None:
        if fault == "crash after":
            await self._die()
        if fault == "lost answer":
            await asyncio.sleep(TIME_OUT_SECONDS if self._faults.number(point, 0, 1) < 0.5 else 0)
            raise ApiError(NO_ANSWER, "NoAnswer", f"{method} {path}: the answer was lost")
        if fault == "slow answer":
            await asyncio.sleep(self._faults.number(point, 0.1, 20))

    async def _die(self) -> None:
        self._crash()
        await self._for_ever()

    async def _for_ever(self) -> None:
        await self._loop.create_future()

    async def _reachable(self, method: str, path: str) -> None:
        if self.dead:
            await self._for_ever()
        if self.away:
            await asyncio.sleep(5)
            self.availability.failed()
            raise ApiError(NO_ANSWER, "NoAnswer", f"{method} {path}: cannot be reached")
        self.availability.answered()


def _wake(waiting: asyncio.Future[bool], value: bool) -> None:
    if not waiting.done():
        waiting.set_result(value)
