"""Verifies a trainer's projected service-account token with the public keys of the cluster, and finds its pod.

The operator fetches the keys and verifies tokens itself. A TokenReview would be a write per report, and would need a
right over every token of the cluster. A token is accepted if its signature, issuer, audience and expiry are right, and
it is bound to a pod. Tokens are never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import jwt

from ddpjob_operator.job.newest import Newest
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.pods import report_token

# kube-apiserver signs with RSA or ECDSA keys, also through an external signer. The token must not choose the algorithm.
ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")
ISSUER_PATH, KEYS_PATH = "/.well-known/openid-configuration", "/openid/v1/jwks"
TOKEN_LENGTH_MAX = 4096  # characters; a projected token has about 1,200
LEEWAY_SECONDS = 30.0  # seconds that clocks may differ: otherwise a new token might not be valid yet
KEYS_AGE_SECONDS = 3600.0  # seconds for which a withdrawn key is still trusted
RETRY_SECONDS = 10.0  # seconds between two fetches, however many tokens with unknown keys arrive
PROVEN_MAX = 10_000  # verified tokens that are remembered, 200 bytes each; only the cluster's pods can add tokens
HIDDEN_RETRY_SECONDS = 300.0  # seconds between two fetches while the cluster does not publish its keys

Get = Callable[[str], Awaitable[dict[str, Any]]]
"""GET a path of the API server with the operator's credentials; return the JSON object. Raises ApiError."""


class BoundPod(NamedTuple):
    """The pod that a token is bound to."""

    namespace: str
    name: str
    uid: str


class _Proven(NamedTuple):
    """A token that was verified before, with its pod and expiry."""

    keys: Keys
    expires_at: float
    pod: BoundPod


class BadTokenError(Exception):
    """The token is not accepted; the message gives the reason and never the token."""


class _OtherIssuerError(BadTokenError):
    """The token is valid except for its issuer."""


class NoKeysError(Exception):
    """No token can be verified now; the message gives the reason."""


@dataclass(frozen=True)
class Keys:
    """The issuer of the cluster's tokens, and the public keys that verify them."""

    issuer: str = ""
    by_id: dict[str, jwt.PyJWK] = field(default_factory=dict)


class Verifier:
    """Finds the pod of a token. `on_hidden` gets a sentence once when the cluster refuses to show its keys."""

    def __init__(
        self,
        get: Get,
        on_hidden: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.verified = 0
        """Number of tokens whose signature was checked."""
        self._get, self._on_hidden, self._clock, self._wall = get, on_hidden, clock, wall
        self._keys: Keys | None = None
        self._fetched_at = 0.0
        self._fetch_not_before = clock()
        self._problem = "the cluster's keys were not fetched yet"
        self._hidden = False
        self._fetching = asyncio.Lock()
        self.proven: Newest[bytes, _Proven] = Newest(PROVEN_MAX)
        """By SHA-256 of the token."""

    async def pod(self, token: str) -> BoundPod:
        """Return the pod that this token is bound to. Raise BadTokenError or NoKeysError."""
        if len(token) > TOKEN_LENGTH_MAX:
            raise BadTokenError(f"the token has {len(token)} characters, at most {TOKEN_LENGTH_MAX} are read")
        if not token.isascii():  # aiohttp passes invalid UTF-8 on as surrogates, on which PyJWT fails
            raise BadTokenError("the token is not a JSON Web Token")
        # A pod sends one token for an hour, and verifying it takes a fifth of the time for its report (bench/results).
        digest = hashlib.sha256(token.encode()).digest()
        known, fresh = self.proven.get(digest), self._clock() - self._fetched_at < KEYS_AGE_SECONDS
        if known is not None and known.keys is self._keys and fresh and self._wall() < known.expires_at:
            return known.pod
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid", ""))
        except jwt.PyJWTError:
            raise BadTokenError("the token is not a JSON Web Token") from None
        keys = self._keys
        if keys is None or key_id not in keys.by_id or not fresh:
            keys = await self._renewed(keys)
        try:
            return self._bound_pod(token, keys, key_id, digest)
        except _OtherIssuerError:
            # The cluster may have changed its issuer and kept its key: fetch once before refusing.
            renewed = await self._renewed(keys)
            if renewed is keys:
                raise
            return self._bound_pod(token, renewed, key_id, digest)

    def _bound_pod(self, token: str, keys: Keys, key_id: str, digest: bytes) -> BoundPod:
        self.verified += 1
        key = keys.by_id.get(key_id)
        if key is None:
            raise BadTokenError("the token is signed with a key that this cluster does not publish")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=report_token.AUDIENCE,
                issuer=keys.issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidIssuerError:
            raise _OtherIssuerError("the token has another issuer") from None
        except jwt.PyJWTError as error:
            raise BadTokenError(_reason(error)) from None
        pod = _pod(claims)
        self.proven[digest] = _Proven(keys, float(claims["exp"]), pod)
        return pod

    async def _renewed(self, known: Keys | None) -> Keys:
        """Return the current keys. Fetch them first, unless another task has just fetched them or it is too soon."""
        async with self._fetching:
            if self._keys is known and self._clock() >= self._fetch_not_before:
                await self._renew()
        if self._keys is None:
            raise NoKeysError(self._problem)
        return self._keys

    async def _renew(self) -> None:
        self._fetch_not_before = self._clock() + RETRY_SECONDS
        try:
            self._keys = _read_keys(await self._get(ISSUER_PATH), await self._get(KEYS_PATH))
        except (ApiError, ValueError) as error:
            if not isinstance(error, ApiError) or error.status != 403:
                # Keep the old keys: a short outage of the API server is no reason to refuse reports.
                self._problem = f"the cluster's keys cannot be read: {error}"
                return
            self._fetch_not_before = self._clock() + HIDDEN_RETRY_SECONDS
            self._keys = None
            self._problem = (
                f"The cluster hides the keys of its service accounts ({error.message}), so no trainer's token can be "
                "verified and no progress is shown. Bind the ClusterRole system:service-account-issuer-discovery to "
                "the operator's service account."
            )
            if not self._hidden:
                self._hidden = True
                self._on_hidden(self._problem)
        else:
            self._hidden = False
            self._fetched_at = self._clock()


def _read_keys(issuer: dict[str, Any], published: dict[str, Any]) -> Keys:
    """Return the usable keys. Raise ValueError."""
    name = issuer.get("issuer")
    listed = published.get("keys")
    if not isinstance(name, str) or not name or not isinstance(listed, list):
        raise ValueError("the issuer or the list of keys is missing")
    by_id = {}
    for entry in listed:
        try:
            key = jwt.PyJWK(entry)
        except (jwt.PyJWTError, AttributeError, TypeError):
            continue  # an unknown kind of key: only tokens signed with it are refused
        # A published symmetric key would let everybody sign.
        if key.algorithm_name in ALGORITHMS and key.key_id:
            by_id[key.key_id] = key
    return Keys(name, by_id)


def _pod(claims: dict[str, Any]) -> BoundPod:
    """Return the pod in the claim kubernetes.io, which the API server adds for a pod's projected token."""
    match claims.get("kubernetes.io"):
        case {"namespace": str(namespace), "pod": {"name": str(name), "uid": str(uid)}} if uid:
            return BoundPod(namespace, name, uid)
    raise BadTokenError("the token is bound to no pod; only a pod's projected token is accepted")


def _reason(error: jwt.PyJWTError) -> str:
    """Return the reason for the error in our own words, because PyJWT's text may repeat parts of the token."""
    reasons: dict[type[jwt.PyJWTError], str] = {
        jwt.ExpiredSignatureError: "the token has expired",
        jwt.InvalidAudienceError: "the token is for another audience",
        jwt.ImmatureSignatureError: "the token is not valid yet",
        jwt.InvalidSignatureError: "the token's signature is wrong",
    }
    return reasons.get(type(error), f"the token is not valid ({type(error).__name__})")
