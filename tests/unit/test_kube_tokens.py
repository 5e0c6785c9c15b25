"""The check of a pod's token: which tokens are accepted, how a refusal reads, and when the cluster's keys are read."""

import asyncio
import base64
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from pod_tokens import ISSUER, POD, RSA_KEY, claims, published, token

from ddpjob_operator.kube.api import tokens
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.tokens import BadTokenError, BoundPod, NoKeysError, Verifier

OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


class Cluster:
    """The two documents about token keys that an API server publishes, and the number of reads of them."""

    def __init__(self, proven_max: int = tokens.PROVEN_MAX) -> None:
        self.issuer = ISSUER
        self.keys = [published(RSA_KEY, "one", "RS256")]
        self.error: ApiError | None = None
        self.asked = 0
        self.hidden: list[str] = []
        self.now = 100_000.0
        self.wall = time.time()
        self.verifier = Verifier(self.get, self.hidden.append, clock=lambda: self.now, wall=lambda: self.wall)
        self.verifier.proven.most = proven_max

    async def get(self, path: str) -> dict[str, Any]:
        if path == "/.well-known/openid-configuration":
            self.asked += 1
        if self.error is not None:
            raise self.error
        if path == "/openid/v1/jwks":
            return {"keys": self.keys}
        assert path == "/.well-known/openid-configuration"
        return {"issuer": self.issuer, "jwks_uri": "https://10.0.0.1/openid/v1/jwks"}

    def whose(self, text: str) -> BoundPod:
        return asyncio.run(self.verifier.pod(text))


AWAY = ApiError(0, "ClientConnectorError", "GET /openid/v1/jwks: connection refused")
HIDDEN = ApiError(403, "Forbidden", 'User "system:serviceaccount:ddpjob:operator" cannot get path "/openid/v1/jwks"')


def test_a_projected_token_names_its_pod() -> None:
    assert Cluster().whose(token()) == POD


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("ES256", EC_KEY), ("ES384", ec.generate_private_key(ec.SECP384R1()))],
    ids=["ES256", "ES384"],
)
def test_elliptic_curve_keys_of_the_cluster_are_read_too(algorithm: str, key: Any) -> None:
    cluster = Cluster()
    cluster.keys.append(published(key, "two", algorithm))
    assert cluster.whose(token(key, "two", algorithm)) == POD


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "the audience is the API server's": (lambda: token(aud=["https://kubernetes.default.svc"]), "another audience"),
    "there is no audience": (lambda: token(aud=None), "MissingRequiredClaim"),
    "the issuer is another cluster": (lambda: token(iss="https://elsewhere"), "another issuer"),
    "it has expired": (lambda: token(exp=int(time.time()) - 60), "has expired"),
    "it never expires": (lambda: token(exp=None), "MissingRequiredClaim"),
    "it is valid in an hour": (lambda: token(nbf=int(time.time()) + 3600), "not valid yet"),
    "another key signed it under a known name": (lambda: token(OTHER_KEY), "signature is wrong"),
    "an unknown key signed it": (lambda: token(OTHER_KEY, "other"), "does not publish"),
    "it names no key": (lambda: jwt.encode(claims(), RSA_KEY, algorithm="RS256"), "does not publish"),
    "nothing signed it": (lambda: jwt.encode(claims(), None, algorithm="none", headers={"kid": "one"}), "not valid"),
    "the public key was taken for a secret": (lambda: forged_with_the_public_key(), "not valid"),
    "it is bound to no pod": (lambda: token(**{"kubernetes.io": {"namespace": "default"}}), "bound to no pod"),
    "its pod has no uid": (lambda: token(**{"kubernetes.io": {"namespace": "x", "pod": {"name": "y"}}}), "bound to no"),
    "its pod's uid is not a text": (lambda: token(**{"kubernetes.io": {"pod": {"uid": 7}}}), "bound to no pod"),
    "its claims are of another shape": (lambda: token(**{"kubernetes.io": "pod"}), "bound to no pod"),
    "it is garbage": (lambda: "garbage", "not a JSON Web Token"),
    # These tokens must not raise an exception. Otherwise any pod could write tracebacks into the operator's log.
    **{
        f"it is {text!a}": (partial(str, text), "not a JSON Web Token")
        for text in ("é.ü.ß", "\udcff.a.b", "a.b.c", "..", "\0")
    },
    "it is longer than any token": (lambda: "a" * 5000, "5000 characters"),
}


def forged_with_the_public_key() -> str:
    """Return a token forged with HS256 and the public key as the secret. PyJWT refuses to sign like this, but an
    attacker can do it."""
    parts = [{"alg": "HS256", "typ": "JWT", "kid": "one"}, claims()]
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=").decode() for p in parts), "c2ln"])


@pytest.mark.parametrize("case", REFUSED, ids=REFUSED.keys())
def test_an_invalid_token_is_refused(case: str) -> None:
    make, why = REFUSED[case]
    text = make()
    with pytest.raises(BadTokenError, match=why) as refused:
        Cluster().whose(text)
    assert text[-20:] not in str(refused.value), "a refusal must not repeat the token"


def test_clocks_may_differ_by_a_few_seconds() -> None:
    late, early = int(time.time()) - 10, int(time.time()) + 10
    assert Cluster().whose(token(exp=late)) == POD
    assert Cluster().whose(token(nbf=early, iat=early)) == POD


def test_a_published_symmetric_key_is_never_used() -> None:
    cluster, secret = Cluster(), b"0123456789abcdef0123456789abcdef"
    shown = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    cluster.keys += [{"kty": "oct", "k": shown, "kid": "shared"}, {"kty": "new"}, {"kid": "empty"}]
    with pytest.raises(BadTokenError):
        cluster.whose(token(secret, "shared", "HS256"))
    assert cluster.whose(token()) == POD, "a key that cannot be read must not hide the others"


def test_many_tokens_cause_one_request_even_if_they_arrive_together() -> None:
    cluster = Cluster()

    async def many() -> list[BoundPod]:
        return await asyncio.gather(*(cluster.verifier.pod(token()) for _ in range(20)))

    assert asyncio.run(many()) == [POD] * 20
    assert cluster.asked == 1


def test_a_new_key_or_issuer_of_the_cluster_is_found_without_a_restart() -> None:
    cluster = Cluster()
    cluster.whose(token())
    cluster.now += 3600
    cluster.keys.append(published(EC_KEY, "two", "ES256"))
    assert cluster.whose(token(EC_KEY, "two", "ES256")) == POD
    assert cluster.asked == 2
    cluster.issuer = "https://issuer.example"
    cluster.now += tokens.RETRY_SECONDS
    assert cluster.whose(token(iss="https://issuer.example")) == POD


def test_a_flood_of_unknown_keys_does_not_become_a_flood_of_requests() -> None:
    cluster = Cluster()
    for n in range(50):
        with pytest.raises(BadTokenError):
            cluster.whose(token(OTHER_KEY, f"unknown-{n}"))
    assert cluster.asked == 1
    cluster.now += tokens.RETRY_SECONDS
    with pytest.raises(BadTokenError):
        cluster.whose(token(OTHER_KEY, "unknown"))
    assert cluster.asked == 2


def test_a_key_that_the_cluster_withdrew_is_accepted_for_at_most_an_hour() -> None:
    cluster = Cluster()
    cluster.whose(token())
    cluster.keys = [published(EC_KEY, "two", "ES256")]
    cluster.now += tokens.KEYS_AGE_SECONDS
    with pytest.raises(BadTokenError, match="does not publish"):
        cluster.whose(token())


def test_a_token_is_verified_once_until_it_expires_or_the_keys_are_read_again() -> None:
    """A token must be verified only once until it expires: each check takes a fifth of a report's time."""
    cluster, text = Cluster(), token()
    for _ in range(3):
        assert cluster.whose(text) == POD
    assert cluster.verifier.verified == 1
    cluster.wall += 3601
    cluster.whose(text)
    assert cluster.verifier.verified == 2, "it is not believed beyond its own time"
    cluster.wall -= 3601
    cluster.now += tokens.KEYS_AGE_SECONDS
    cluster.whose(text)
    cluster.whose(text)
    assert cluster.verifier.verified == 3, "nor after a key may have been withdrawn"


def test_the_cache_of_valid_tokens_is_bounded_and_invalid_ones_are_not_cached() -> None:
    """The cache must have a limit, so that a client with many forged tokens cannot fill the operator's memory."""
    cluster, text = Cluster(), token(OTHER_KEY)
    for _ in range(2):
        with pytest.raises(BadTokenError, match="signature"):
            cluster.whose(text)
    assert cluster.verifier.verified == 2
    cluster = Cluster(proven_max=2)
    first, *others = (token(jti=str(number)) for number in range(3))
    for each in (first, *others, first):
        cluster.whose(each)
    assert cluster.verifier.verified == 4, "the oldest has made room"


def test_an_unavailable_api_server_costs_no_report_once_its_keys_are_known() -> None:
    cluster = Cluster()
    cluster.whose(token())
    cluster.error = AWAY
    cluster.now += tokens.KEYS_AGE_SECONDS
    assert cluster.whose(token()) == POD


@pytest.mark.parametrize("status", [0, 401, 429, 500, 503])
def test_without_keys_the_answer_is_to_retry_later_and_keys_are_not_fetched_again_at_once(status: int) -> None:
    cluster = Cluster()
    cluster.error = ApiError(status, "Away", "no keys now")
    for _ in range(5):
        with pytest.raises(NoKeysError, match="no keys now"):
            cluster.whose(token())
    assert (cluster.asked, cluster.hidden) == (1, [])
    cluster.error = None
    cluster.now += tokens.RETRY_SECONDS
    assert cluster.whose(token()) == POD


def test_malformed_documents_contain_no_keys() -> None:
    cluster = Cluster()
    cluster.issuer = ""
    with pytest.raises(NoKeysError, match="issuer"):
        cluster.whose(token())


def test_a_cluster_that_hides_its_keys_is_logged_once_and_recovers_by_itself() -> None:
    cluster = Cluster()
    cluster.error = HIDDEN
    for _ in range(3):
        with pytest.raises(NoKeysError, match="service-account-issuer-discovery"):
            cluster.whose(token())
        cluster.now += tokens.HIDDEN_RETRY_SECONDS
    assert len(cluster.hidden) == 1
    assert 'cannot get path "/openid/v1/jwks"' in cluster.hidden[0]
    assert cluster.asked == 3
    cluster.error = None
    assert cluster.whose(token()) == POD
    cluster.error = HIDDEN
    cluster.now += tokens.KEYS_AGE_SECONDS
    with pytest.raises(NoKeysError):
        cluster.whose(token())
    assert len(cluster.hidden) == 2
