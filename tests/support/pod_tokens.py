"""Tokens of pods, as an API server signs them, and the keys that it publishes."""

from __future__ import annotations

import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from ddpjob_operator.kube.api.tokens import BoundPod

ISSUER = "https://kubernetes.default.svc.cluster.local"
POD = BoundPod("default", "digits-1-0", "7d0c6f1e-0000-4000-8000-0000000000aa")
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def published(key: Any = RSA_KEY, key_id: str = "one", algorithm: str = "RS256") -> dict[str, Any]:
    kind = RSAAlgorithm if algorithm.startswith("RS") else ECAlgorithm
    return json.loads(kind.to_jwk(key.public_key())) | {"kid": key_id, "alg": algorithm, "use": "sig"}


def claims(pod: BoundPod = POD, **changes: Any) -> dict[str, Any]:
    """Return the claims of a pod's token as the API server writes them. None removes a claim."""
    now = int(time.time())
    told = {
        "aud": ["training.ddpjob.io"],
        "exp": now + 3600,
        "iat": now,
        "nbf": now,
        "iss": ISSUER,
        "sub": "system:serviceaccount:default:default",
        "kubernetes.io": {
            "namespace": pod.namespace,
            "pod": {"name": pod.name, "uid": pod.uid},
            "serviceaccount": {"name": "default", "uid": "0"},
        },
    } | changes
    return {name: value for name, value in told.items() if value is not None}


def token(
    key: Any = RSA_KEY, key_id: str = "one", algorithm: str = "RS256", *, pod: BoundPod = POD, **changes: Any
) -> str:
    return jwt.encode(claims(pod, **changes), key, algorithm=algorithm, headers={"kid": key_id})
