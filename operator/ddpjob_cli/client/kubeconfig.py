"""Read an API server's address and the user's credentials: from kubeconfig files, as kubectl does, or from a pod."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import ipaddress
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml
from urllib3.util.ssl_ import create_urllib3_context

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import bounds
from ddpjob_operator.job.typos import suggestion

Raw = dict[str, Any]

IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_CONNECTIONS_MAX = 1000  # connections kept open; each followed log has its own
_TO_PLUGINS = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")


class CredentialsError(ClusterError):
    """A plugin or a file did not give credentials."""


@dataclass(frozen=True)
class Access:
    """Access to an API server: its address, connections to it, and the user's credentials."""

    context: str
    namespace: str
    server: str
    pool: urllib3.PoolManager
    credentials: Credentials


class Credentials:
    """The user's credentials: a header for each request, or a certificate."""

    def __init__(self, user: Raw, cluster: Raw) -> None:
        self._user, self._cluster = user, cluster
        self._lock = threading.Lock()
        self._token = user.get("token") or ((user.get("auth-provider") or {}).get("config") or {}).get("id-token")
        self._until: dt.datetime | None = None
        self.certificate = [part for key in ("client-certificate", "client-key") if (part := _bytes(user, key))]
        if "exec" in user and not self._token and not user.get("tokenFile"):
            self._ask(user["exec"])

    def header(self) -> str | None:
        """Return the value of Authorization. For a new token a plugin may ask the user. Raise CredentialsError."""
        with self._lock:
            if self._until is not None and dt.datetime.now(dt.timezone.utc) >= self._until:
                self._ask(self._user["exec"])
        token = self._token
        if path := self._user.get("tokenFile"):  # read each time, because the token is replaced from time to time
            try:
                token = Path(path).read_text().strip()
            except OSError as error:
                raise CredentialsError(f"{path}: {error.strerror}") from None
        if token:
            return f"Bearer {token}"
        if "username" in self._user and "password" in self._user:
            pair = f"{self._user['username']}:{self._user['password']}"
            return f"Basic {base64.b64encode(pair.encode()).decode()}"
        return None

    def _ask(self, plugin: Raw) -> None:
        spec: Raw = {"interactive": sys.stdin.isatty() and plugin.get("interactiveMode") != "Never"}
        if plugin.get("provideClusterInfo"):
            spec["cluster"] = _for_plugin(self._cluster)
        try:
            info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": spec}
            own = {one["name"]: one["value"] for one in plugin.get("env") or ()}
            done = subprocess.run(
                [plugin["command"], *(plugin.get("args") or ())],
                env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                stdin=None if spec["interactive"] else subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=None if sys.stderr.isatty() else subprocess.PIPE, check=False,
            )  # fmt: skip
            if done.returncode:
                said = (done.stderr or b"").decode(errors="replace")
                raise CredentialsError(f"{plugin['command']} returned {done.returncode}: {said}")
            status = json.loads(done.stdout)["status"]
            if "clientCertificateData" in status:
                self.certificate = [status[f"client{part}Data"].encode() for part in ("Certificate", "Key")]
            self._token, self._until = status.get("token"), bounds.time(status.get("expirationTimestamp"))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CredentialsError(f"{plugin.get('command')}: {error}") from None
        if not self._token and not self.certificate:
            raise CredentialsError(f"{plugin['command']} gives neither a token nor a certificate")


def of_pod() -> Access:
    """Return the cluster of the pod in which this process runs, as its service account. Raise InputError."""
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        cluster = {
            "server": f"https://{f'[{host}]' if ':' in host else host}:{port}",
            "certificate-authority": str(IN_POD / "ca.crt"),
        }
        namespace = (IN_POD / "namespace").read_text().strip()
        return _access("this pod's cluster", namespace, cluster, {"tokenFile": str(IN_POD / "token")})
    except (KeyError, OSError, CredentialsError):
        text = "no cluster is known: KUBECONFIG is not set, and there is no ~/.kube/config. "
        raise InputError(f"{text}On this machine alone: ddpjob run") from None


def of_files(named: str, wanted: str | None) -> Access:
    """Return the access of a context; of the current context if `wanted` is None. named: files separated by colons."""
    try:
        return _of_files(named, wanted)
    except InputError:
        raise
    except Exception as error:  # a file may contain anything, so any exception is possible
        raise InputError(f"{named}: the kubeconfig cannot be used: {short(error)}") from None


def _of_files(named: str, wanted: str | None) -> Access:
    merged, current = _merged(named)
    contexts = merged["contexts"]
    if wanted is not None and wanted not in contexts:
        there = ", ".join(contexts) or "none"
        raise InputError(f"--context {wanted}: not in {named}{suggestion(wanted, contexts)} (there: {there})")
    name = current if wanted is None else wanted
    if name not in contexts:
        without = "it has no current context" if contexts else "it does not exist, or has no context"
        raise ValueError(f"the current context {name} is not in it" if name else without)
    context = contexts[name]
    cluster = merged["clusters"].get(str(context.get("cluster")))
    if cluster is None or "server" not in cluster:
        raise ValueError(f"context {name} has no cluster with a server")
    try:
        user = merged["users"].get(str(context.get("user"))) or {}
        return _access(f"context {name}", str(context.get("namespace") or "default"), cluster, user)
    except CredentialsError as error:
        raise InputError(f"{named}: no credentials for context {name}: {' '.join(str(error).split())[:300]}") from None


def _merged(named: str) -> tuple[dict[str, dict[str, Raw]], str]:
    """Return the entries of all files by kind and name, and the current context. The first entry of a name counts."""
    merged: dict[str, dict[str, Raw]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = ""
    for path in (Path(one).expanduser().absolute() for one in named.split(os.pathsep) if one):
        if not path.exists():
            continue
        config = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        if not isinstance(config, dict):
            raise TypeError("it is not a mapping")
        current = current or str(config.get("current-context") or "")
        for kind, known in merged.items():
            for one in config.get(kind) or ():
                known.setdefault(str(one["name"]), _from(path.parent, one.get(kind[:-1]) or {}))
    return merged, current


def _from(folder: Path, entry: Raw) -> Raw:
    """Return an entry with paths relative to the folder of its file."""
    paths: Raw = {key: str(folder / entry[key]) for key in _FILES if entry.get(key)}
    plugin = entry.get("exec") or {}
    if os.sep in str(plugin.get("command") or ""):
        paths["exec"] = {**plugin, "command": str(folder / plugin["command"])}
    return {**entry, **paths}


def _access(context: str, namespace: str, cluster: Raw, user: Raw) -> Access:
    credentials = Credentials(user, cluster)
    credentials.header()
    server = str(cluster["server"]).rstrip("/")
    return Access(context, namespace, server, _pool(server, cluster, credentials.certificate), credentials)


def _pool(server: str, cluster: Raw, certificate: list[bytes]) -> urllib3.PoolManager:
    is_checked = ssl.CERT_NONE if cluster.get("insecure-skip-tls-verify") else ssl.CERT_REQUIRED
    warnings.filterwarnings("ignore", message=".*Unverified HTTPS request.*")  # the kubeconfig disables verification
    tls = create_urllib3_context(cert_reqs=is_checked)
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT  # set by Python 3.13; many clusters' CAs lack required fields
    if authority := _bytes(cluster, "certificate-authority"):
        tls.load_verify_locations(cadata=authority.decode())
    else:
        tls.load_default_certs()
    if certificate:
        with tempfile.NamedTemporaryFile() as file:  # ssl loads a client certificate only from a file
            file.write(b"\n".join(certificate))
            file.flush()
            tls.load_cert_chain(file.name)
    settings: Raw = {"ssl_context": tls, "cert_reqs": is_checked, "maxsize": _CONNECTIONS_MAX}
    if name := cluster.get("tls-server-name"):
        settings["server_hostname"] = name
    proxy = cluster.get("proxy-url") or _proxy_of_environment(server)
    if proxy and proxy.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager

        return SOCKSProxyManager(proxy, **settings)
    return urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)


def _proxy_of_environment(server: str) -> str | None:
    url, proxies = urllib.parse.urlsplit(server), urllib.request.getproxies()
    host = url.hostname or ""
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return None
    with contextlib.suppress(ValueError):  # a host name raises ValueError, and is in no network
        address = ipaddress.ip_address(host)
        networks = [one for one in re.split("[, ]+", proxies.get("no", "")) if "/" in one]  # as kubectl reads them
        if any(address in ipaddress.ip_network(network, strict=False) for network in networks):
            return None
    return proxies.get(url.scheme)


def _for_plugin(cluster: Raw) -> Raw:
    told = {key: cluster[key] for key in _TO_PLUGINS if key in cluster}
    if authority := _bytes(cluster, "certificate-authority"):
        told["certificate-authority-data"] = base64.b64encode(authority).decode()
    own = [e for e in cluster.get("extensions") or () if e["name"] == "client.authentication.k8s.io/exec"]
    return {**told, **({"config": own[0]["extension"]} if own else {})}


def _bytes(entry: Raw, key: str) -> bytes | None:
    """Return a certificate or key, from the entry itself or from the file that it names."""
    if data := entry.get(f"{key}-data"):
        return base64.b64decode(data)
    return Path(entry[key]).read_bytes() if entry.get(key) else None


def short(error: BaseException) -> str:
    """Return the reason in an exception's text, without the repr of objects that urllib3 puts before it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rsplit(">: ", 1)[-1].rsplit("): ", 1)[-1][:200] if "object at 0x" in text else text[:200]
