"""The operator's credentials, shared by kopf's login handler and our own client so that they agree."""

from __future__ import annotations

import logging
import os
from typing import Any

import kopf

_LOGGER = logging.getLogger(__name__)


class LoginError(Exception):
    """There are no usable credentials; the message lists the places that were tried."""


def login() -> kopf.ConnectionInfo:
    """Read the credentials: from KUBECONFIG if it is set, else the pod's service account, else ~/.kube/config.

    They are read at each call, because the kubelet rotates bound tokens in their file. Raise LoginError.
    """
    settings = kopf.OperatorSettings()
    named = bool(os.environ.get("KUBECONFIG"))
    try:
        info = None if named else kopf.login_with_service_account(settings=settings)
        info = info or _from_kubeconfig(settings)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, kopf.LoginError) as error:
        raise LoginError(f"the kubeconfig cannot be used: {error!r}") from None
    if info is None or not info.server:
        raise LoginError("neither KUBECONFIG, nor a service account's token, nor ~/.kube/config is there")
    return info


def _from_kubeconfig(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo | None:
    info: Any = kopf.login_with_kubeconfig(settings=settings)
    if info is None or info.token or info.username or info.certificate_path or info.certificate_data:
        return info  # type: ignore[no-any-return]
    # Without credentials in the file, a plugin provides them (exec, OIDC), and only the full client runs plugins.
    return kopf.login_via_client(settings=settings, logger=_LOGGER)
