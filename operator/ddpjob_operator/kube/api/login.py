"""The operator's credentials. kopf's login handler and our own client both call it, so that they agree."""

from __future__ import annotations

import logging
import os
from typing import Any

import kopf

_LOGGER = logging.getLogger(__name__)


class LoginError(Exception):
    """No usable credentials; the text says where they were looked for."""


def login() -> kopf.ConnectionInfo:
    """Credentials, read again at each call, because bound tokens are rotated in their file. Raises LoginError.

    KUBECONFIG goes first where it is set, then the service account of the pod, then ~/.kube/config.
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
    # No credentials in the file itself: a plugin gives them (exec, OIDC), and only the full client runs plugins.
    return kopf.login_via_client(settings=settings, logger=_LOGGER)
