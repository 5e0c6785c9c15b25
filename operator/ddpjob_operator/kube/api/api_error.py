"""Errors of requests to the API server. Their messages are the server's own text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

Raw = dict[str, Any]
NO_ANSWER = 0
BAD_ANSWER = "BadAnswer"


class ApiError(Exception):
    """The API server refused (status 4xx, 5xx) or did not answer (status 0). `message`: the server's sentence."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else f"{reason}: {message}")
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_seconds = retry_after_seconds

    @property
    def refuses_patch(self) -> bool:
        """True if the pod cannot be patched: an older chart's role lacks the right, or the pod has changed or is
        gone."""
        return self.status in (403, 404, 405, 409, 422)

    @property
    def needs_list(self) -> bool:
        """True if a watch must list first: its version was refused, events were lost, or the answer is not an event.
        After a broken connection, an expired login or a busy server the watch continues at its version, without a
        list."""
        return self.reason == BAD_ANSWER or (self.status >= 400 and self.status not in (401, 429))


class TooLargeError(ApiError):
    """An answer exceeds the limit of bytes to read."""


def of_answer(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Return the error for an answer with status 400 or more. headers: case-insensitive, as aiohttp gives them."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = content.decode(errors="replace")[:300]
    if not isinstance(body, dict):
        body = {"message": str(body)}
    return of_status({**body, "code": status}, headers.get("Retry-After"))


def of_status(status: Raw, retry_after: str | None = None) -> ApiError:
    """Return the error that a metav1.Status describes."""
    code = status.get("code")
    details = status.get("details")
    after = retry_after or (details.get("retryAfterSeconds") if isinstance(details, dict) else None)
    try:
        seconds = None if after is None else max(0.0, float(after))
    except (ValueError, TypeError):  # HTTP also allows a date, which Kubernetes never sends
        seconds = None
    message = str(status.get("message") or "no reason given").strip()
    return ApiError(code if isinstance(code, int) else 500, str(status.get("reason") or "Unknown"), message, seconds)


def no_answer(method: str, path: str, error: Exception) -> ApiError:
    """Return the error for a request that got no answer."""
    what = "the API server did not answer in time" if isinstance(error, asyncio.TimeoutError) else str(error)
    return ApiError(NO_ANSWER, "NoAnswer", f"{method} {path}: {what or type(error).__name__}")


def bad_answer(method: str, path: str, error: Exception) -> ApiError:
    """Return the error for an answer that is not what was requested, for example from a proxy."""
    return ApiError(NO_ANSWER, BAD_ANSWER, f"{method} {path}: {error}")
