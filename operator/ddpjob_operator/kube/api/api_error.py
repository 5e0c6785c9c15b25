"""Why a request was not carried out, in the API server's own words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

Raw = dict[str, Any]
NO_ANSWER = 0
BAD_ANSWER = "BadAnswer"


class ApiError(Exception):
    """The API server has refused (status 4xx, 5xx), or has not answered (status 0). `message` is its own sentence."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else f"{reason}: {message}")
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_seconds = retry_after_seconds

    @property
    def gone(self) -> bool:
        """Whether a resource version is too old to go on from."""
        return self.status == 410

    @property
    def refuses_patch(self) -> bool:
        """Whether a patch of a pod is not possible: the role of an older chart lacks it, or the pod has changed, or is
        gone, meanwhile."""
        return self.status in (403, 404, 405, 409, 422)

    @property
    def needs_list(self) -> bool:
        """True if a watch cannot go on from where it was: its version was refused, events were lost, or what came was
        none. A connection that broke, a login that has expired and a server that is busy cost no list."""
        return self.reason == BAD_ANSWER or (self.status >= 400 and self.status not in (401, 429))


class TooLargeError(ApiError):
    """An answer is larger than what was to be read of it."""


def of_answer(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Of an answer with a code of 400 or more. headers: as aiohttp gives them, which compares names in any case."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = content.decode(errors="replace")[:300]
    if not isinstance(body, dict):
        body = {"message": str(body)}
    return of_status({**body, "code": status}, headers.get("Retry-After"))


def of_status(status: Raw, retry_after: str | None = None) -> ApiError:
    """From a metav1.Status."""
    code = status.get("code")
    details = status.get("details")
    after = retry_after or (details.get("retryAfterSeconds") if isinstance(details, dict) else None)
    try:
        seconds = None if after is None else max(0.0, float(after))
    except (ValueError, TypeError):  # a date, as HTTP allows and Kubernetes never sends
        seconds = None
    message = str(status.get("message") or "no reason given").strip()
    return ApiError(code if isinstance(code, int) else 500, str(status.get("reason") or "Unknown"), message, seconds)


def no_answer(method: str, path: str, error: Exception) -> ApiError:
    """A request that has got no answer."""
    what = "the API server did not answer in time" if isinstance(error, asyncio.TimeoutError) else str(error)
    return ApiError(NO_ANSWER, "NoAnswer", f"{method} {path}: {what or type(error).__name__}")


def bad_answer(method: str, path: str, error: Exception) -> ApiError:
    """An answer that is not what was asked for, as from a proxy before the API server."""
    return ApiError(NO_ANSWER, BAD_ANSWER, f"{method} {path}: {error}")
