"""The client reads a kubeconfig as kubectl does: CAs, certificates, plugins, several files, proxies."""

import base64
import datetime as dt
import json
import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ddpjob_cli.client import kubeconfig
from ddpjob_cli.client.connection import connect
from ddpjob_cli.client.errors import NoAnswerError
from ddpjob_cli.manifest.yamlfile import InputError

V1 = "client.authentication.k8s.io/v1"


class Authority:
    """A CA without the extensions that Python 3.13 requires by default, as clusters have it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem, _ = self._signed("kubernetes", self._key, is_authority=True)

    def sign(self, name: str) -> tuple[bytes, bytes]:
        """Return a certificate and its key, as PEM."""
        return self._signed(name, ec.generate_private_key(ec.SECP256R1()), is_authority=False)

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> tuple[bytes, bytes]:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        now = dt.datetime.now(dt.timezone.utc)
        builder = (
            x509.CertificateBuilder().subject_name(named(name)).issuer_name(named("kubernetes"))
            .public_key(key.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )  # fmt: skip
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), pem


class Server:
    """API server over TLS that records the user of each request."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        self.users: list[str] = []
        """The certificate's name, else the Authorization header of each request."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = self.connection.getpeercert()
                server.users.append(dict(told["subject"][0])["commonName"] if told else self.headers["Authorization"])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        (folder / "server.pem").write_bytes(b"".join(authority.sign("kubernetes.default")))
        context.load_cert_chain(folder / "server.pem")
        context.load_verify_locations(cadata=authority.pem.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.http.server_port}"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[Server]:
    made = Server(authority, tmp_path)
    threading.Thread(target=made.http.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def cluster(server: Server, authority: Authority) -> dict[str, Any]:
    """Return a kubeconfig entry for the server, whose certificate is not for 127.0.0.1."""
    data = base64.b64encode(authority.pem).decode()
    return {"server": server.url, "tls-server-name": "kubernetes.default", "certificate-authority-data": data}


def write(path: Path, cluster: dict[str, Any], user: dict[str, Any], context: str = "test") -> str:
    config = {
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": context, "user": user}],
    }
    path.write_text(json.dumps(config))
    return str(path)


def plugin(path: Path, status: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a kubeconfig user with a plugin that prints this status. `{info}` is replaced by the plugin's input."""
    answer = json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": status})
    path.write_text(
        f"#!{sys.executable}\nimport base64, json, os\n"
        "told = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        "said = base64.b64encode(json.dumps(told['spec']).encode()).decode()\n"
        f"open({str(path) + '.calls'!r}, 'a').write('x')\n"
        f"print({answer!r}.replace('{{info}}', said))\n"
    )
    path.chmod(0o755)
    return {"exec": {"apiVersion": V1, "command": f"./{path.name}", **more}}


def ask(config: str, context: str | None = None) -> None:
    connect(context, file=config).get("/version")


def test_every_kind_of_credentials_in_a_kubeconfig_identifies_the_user(server, cluster, authority, tmp_path):
    """Certificates (kubeadm), inside the file or next to it, tokens and plugins must all identify the user."""
    pem, key = authority.sign("jane")
    for name, content in (("jane.crt", pem), ("jane.key", key), ("token", b"from-file\n"), ("ca.crt", authority.pem)):
        (tmp_path / name).write_bytes(content)
    files = {"client-certificate": "jane.crt", "client-key": "jane.key"}
    data = {f"{name}-data": base64.b64encode((tmp_path / file).read_bytes()).decode() for name, file in files.items()}
    status = {"clientCertificateData": pem.decode(), "clientKeyData": key.decode()}
    users: list[tuple[dict[str, Any], str]] = [
        (files, "jane"),
        (data, "jane"),
        ({"token": "secret"}, "Bearer secret"),
        ({"tokenFile": "token"}, "Bearer from-file"),
        ({"username": "jane", "password": "pass"}, f"Basic {base64.b64encode(b'jane:pass').decode()}"),
        ({"auth-provider": {"name": "oidc", "config": {"id-token": "idp"}}}, "Bearer idp"),
        (plugin(tmp_path / "certificate", status), "jane"),
        (plugin(tmp_path / "login", {"token": "fresh"}), "Bearer fresh"),
    ]
    for user, _ in users:
        ask(write(tmp_path / "config", cluster, user))
    assert server.users == [shown for _, shown in users]
    beside = {**cluster, "certificate-authority": "ca.crt"}
    del beside["certificate-authority-data"]
    ask(write(tmp_path / "config", beside, {"token": "secret"}))


def test_a_server_without_a_trusted_certificate_gets_no_request(server, cluster, tmp_path):
    """A server without a trusted certificate must get no request, because it would get the user's token."""
    wrong = base64.b64encode(Authority().pem).decode()
    for other in (
        {"server": server.url},
        {**cluster, "certificate-authority-data": wrong},
        {**cluster, "tls-server-name": "another"},
    ):
        with pytest.raises(NoAnswerError, match="certificate"):
            ask(write(tmp_path / "config", other, {"token": "secret"}))
    assert server.users == []
    ask(write(tmp_path / "config", {"server": server.url, "insecure-skip-tls-verify": True}, {"token": "secret"}))
    assert server.users == ["Bearer secret"]


def test_the_token_of_a_plugin_is_requested_again_only_when_it_has_expired(server, cluster, tmp_path):
    """A plugin must run again when its token expires: tokens are valid for minutes, and logs are followed for days."""
    for expires, calls in (("2999-01-01T00:00:00Z", "x"), ("2020-01-01T00:00:00Z", "xxxx")):
        status = {"token": "fresh", "expirationTimestamp": expires}
        (tmp_path / "login.calls").unlink(missing_ok=True)
        connected = connect(file=write(tmp_path / "config", cluster, plugin(tmp_path / "login", status)))
        connected.get("/version")
        connected.get("/version")
        assert (tmp_path / "login.calls").read_text() == calls


def test_a_plugin_gets_the_cluster_information_if_it_requests_it(server, cluster, tmp_path):
    own = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    user = plugin(tmp_path / "login", {"token": "{info}"}, provideClusterInfo=True)
    ask(write(tmp_path / "config", {**cluster, "extensions": [own]}, user))
    told = json.loads(base64.b64decode(server.users[0].removeprefix("Bearer ")))
    assert told["cluster"] == {**cluster, "config": {"audience": "x"}}


def test_several_files_form_one_kubeconfig_in_which_the_first_value_wins(server, cluster, tmp_path, monkeypatch):
    first = write(tmp_path / "a", cluster, {"token": "a"}, "one")
    other = write(tmp_path / "b", cluster, {"token": "b"}, "two")
    again = write(tmp_path / "c", cluster, {"token": "c"}, "one")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'none'}:{first}:{other}:{again}")
    for context in (None, "two", "one"):
        connect(context).get("/version")
    assert server.users == ["Bearer a", "Bearer b", "Bearer a"]


def test_a_pod_uses_its_service_account(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod, the client must use the pod's token, which Kubernetes replaces each hour."""
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    (tmp_path / "namespace").write_text("team-a\n")
    (tmp_path / "token").write_text("first")
    monkeypatch.setattr(kubeconfig, "IN_POD", tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    connected = connect()
    assert (connected.namespace, connected.context) == ("team-a", "this pod's cluster (https://[::1]:443)")
    (tmp_path / "token").unlink()
    with pytest.raises(InputError, match="ddpjob run"):
        connect()


@pytest.mark.parametrize(
    ("no_proxy", "own", "through"),
    [
        ("", {}, "proxy.corp"),
        ("10.0.0.0/8,127.0.0.0/8", {}, None),
        (".example,127.0.0.1", {}, None),
        ("127.0.0.1", {"proxy-url": "http://bastion:8080"}, "bastion"),
    ],
)
def test_the_proxy_of_a_kubeconfig_or_of_the_environment_is_used(tmp_path, monkeypatch, no_proxy, own, through):
    """The proxy of the kubeconfig or of the environment must be used, for example for a cluster behind a bastion."""
    monkeypatch.setenv("https_proxy", "http://proxy.corp:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    config = write(tmp_path / "config", {"server": "https://127.0.0.1:9", **own}, {"token": "x"})
    proxy = kubeconfig.of_files(config, None).pool.proxy
    assert (proxy.host if proxy else None) == through
