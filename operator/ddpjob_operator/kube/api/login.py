"""The operator's credentials."""

from __future__ import annotations

import logging
import os
from typing import Any

import kopf

_LOGGER = logging.getLogger(__name__)


class LoginError(Exception):
    """There are no usable credentials; the message lists the places that were tried."""


def login() -> kopf.ConnectionInfo:
    """Read the credentials: from KUBECONFIG if it is set, else the pod's service account, else ~/.kube/config. Raise
    LoginError.

    They are read at each call, because the kubelet rotates bound tokens in their file.
    """
    settings = kopf.OperatorSettings()
    named = bool(os.environ.get("KUBECONFIG"))
    try:
        info: Any = None if named else kopf.login_with_service_account(settings=settings)
        info = info or kopf.login_with_kubeconfig(settings=settings)
        if info and not (info.token or info.username or info.certificate_path or info.certificate_data):
            # A plugin provides the credentials (exec, OIDC), and only the full client runs plugins.
            info = kopf.login_via_client(settings=settings, logger=_LOGGER)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, kopf.LoginError) as error:
        raise LoginError(f"the kubeconfig cannot be used: {error!r}") from None
    if info is None or not info.server:
        raise LoginError("neither KUBECONFIG, nor a service account's token, nor ~/.kube/config is there")
    return info  # type: ignore[no-any-return]
