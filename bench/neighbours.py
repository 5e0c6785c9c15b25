"""Measure restart times of a job while a tenant of another namespace attacks the operator, on a real cluster.

    python bench/neighbours.py [--seconds 120] [--attacks none mounts unknown stored churn large asks bodies]

Needs KUBECONFIG, and the chart installed in the namespace ddpjob-system. Jobs of two pods fail one after the other in a
namespace of their own. The first restart of each job is measured from the end of its first container to the start of
the last new container, in whole seconds of the kubelets' clocks. Prints a JSON document for each attack: number of
restarts, their mean and maximum in seconds, and how often the leader changed and an operator was restarted.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import itertools
import json
import os
import random
import ssl
import statistics
import string
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import yaml

KIND = "/apis/training.ddpjob.io/v1alpha1/namespaces/{}/ddpjobs"
SYSTEM, TENANT, VICTIM = "ddpjob-system", "team-a", "team-b"
COMMAND = ["sh", "-c", "sleep 2; exit 1"]
BODY_BYTES = 120 << 20
BODIES_AT_ONCE = 8


class Api:
    """One connection to the API server, with the client certificate or token of KUBECONFIG."""

    def __init__(self) -> None:
        with open(os.environ["KUBECONFIG"], encoding="utf-8") as file:
            config = yaml.safe_load(file)
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_text(cluster, "certificate-authority"))
        if certificate := _text(user, "client-certificate"):
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pair:
                pair.write(certificate + "\n" + _text(user, "client-key"))
                pair.flush()
                context.load_cert_chain(pair.name)
        self.headers = {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}
        self.address = urlsplit(cluster["server"])
        self.http = http.client.HTTPSConnection(self.address.hostname or "", self.address.port, context=context)

    def send(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> http.client.HTTPResponse:
        headers = self.headers | {"Content-Type": kind}
        try:
            self.http.request(method, path, body, headers)
            return self.http.getresponse()
        except http.client.RemoteDisconnected:  # the server has closed the idle connection
            self.http.close()
            self.http.request(method, path, body, headers)
            return self.http.getresponse()

    def patch(self, path: str, body: dict[str, Any]) -> None:
        self.send("PATCH", path, json.dumps(body).encode(), "application/merge-patch+json").read()

    def ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        return json.loads(self.send(method, path, body).read())


def _text(config: dict[str, str], key: str) -> str:
    if data := config.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    if path := config.get(key):
        with open(path, encoding="utf-8") as file:
            return file.read()
    return ""


def job(name: str, pod: dict[str, Any], **spec: Any) -> bytes:
    spec = {"nodes": 1, **spec, "template": {"spec": pod}}
    body = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}, "spec": spec}
    return json.dumps(body).encode()


IMAGE = "ddpjob-operator:0.1.0"
ASK = """
import http.client, os, threading, urllib.parse
url = urllib.parse.urlsplit(os.environ["DDPJOB_STATUS_URL"])
headers = {"Authorization": "Bearer " + open(os.environ["DDPJOB_STATUS_TOKEN_FILE"]).read()}
def ask():
    while True:
        try:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=5)
            while True:
                connection.request("GET", "/v1/leader", headers=headers)
                connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
for _ in range(8):
    threading.Thread(target=ask).start()
"""
DRAW = random.Random(4)
CONTAINER = {"name": "t", "image": "i"}


def word(letters: str, length: int) -> str:
    return "".join(DRAW.choices(letters, k=length))


def mounts() -> Iterator[bytes]:
    """Yield jobs with 900 volumes and 900 mounts whose names are similar but do not match."""
    for number in range(100_000):
        volumes = [{"name": word("ab", 60)} for _ in range(900)]
        at = [{"name": word("ab", 60), "mountPath": f"/{i}"} for i in range(900)]
        yield job(f"m{number}", {"volumes": volumes, "containers": [CONTAINER | {"volumeMounts": at}]})


def unknown() -> Iterator[bytes]:
    """Yield suspended jobs with 4,700 fields each that Kubernetes does not know."""
    field = "activeDeadlineSecondshostnameOverride"
    pods = [{word(field, 26): 1 for _ in range(4_700)} | {"containers": [CONTAINER]} for _ in range(8)]
    for number in range(100_000):
        yield job(f"u{number}", pods[number % 8], suspend=True)


def stored() -> Iterator[bytes]:
    """Yield 2,000 suspended jobs of 280 kB."""
    pods = [
        {"zz": {word(string.ascii_letters, 36): word(string.ascii_letters, 40) for _ in range(3_250)}} for _ in range(8)
    ]
    for number in range(2_000):
        yield job(f"s{number}", pods[number % 8] | {"containers": [CONTAINER]}, suspend=True)


def create(bodies: Callable[[], Iterator[bytes]], over: threading.Event) -> int:
    """Create jobs one after the other, as fast as the API server accepts them. Return how many it accepted."""
    api, made = Api(), 0
    for body in bodies():
        if over.is_set():
            break
        made += api.send("POST", KIND.format(TENANT), body).read().startswith(b'{"apiVersion":"training')
    return made


def churn(over: threading.Event) -> int:
    """Create small suspended jobs, and delete each at once. Return how many."""
    api, made = Api(), 0
    while not over.is_set():
        api.ask("POST", KIND.format(TENANT), job(f"c{made}", {"containers": [CONTAINER]}, suspend=True))
        api.ask("DELETE", f"{KIND.format(TENANT)}/c{made}")
        made += 1
    return made


def large(over: threading.Event) -> int:
    """Change 32 jobs of 10,000 nodes again and again. A quota refuses their pods. Return the number of changes."""
    api, made = Api(), 0
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    api.ask("POST", f"/api/v1/namespaces/{TENANT}/resourcequotas", json.dumps(quota).encode())
    for number in range(32):
        api.ask("POST", KIND.format(TENANT), job(f"l{number}", {"containers": [CONTAINER]}, nodes=10_000))
    while not over.is_set():
        made += 1
        path = f"{KIND.format(TENANT)}/l{made % 32}"
        api.patch(path, {"metadata": {"annotations": {"note": str(made)}}})
    api.ask("DELETE", f"/api/v1/namespaces/{TENANT}/resourcequotas/none")
    return made


def asks(over: threading.Event) -> int:
    """Let 8 pods of a job with 60,000 annotations ask who leads, as often as they can. Return the number of pods."""
    api = Api()
    pod = {"containers": [CONTAINER | {"image": IMAGE, "command": ["python", "-c", ASK]}]}
    body = json.loads(job("a", pod, nodes=8))
    body["metadata"]["annotations"] = {"".join(key): "" for key in itertools.product(string.ascii_lowercase, repeat=4)}
    body["metadata"]["annotations"] = dict(list(body["metadata"]["annotations"].items())[:60_000])
    api.ask("POST", KIND.format(TENANT), json.dumps(body).encode())
    over.wait()
    return 8


def bodies(over: threading.Event) -> int:
    """Send bodies that expand to 120 MiB to the health port of each operator. Return how many.

    Run this where pod addresses are reachable.
    """
    body = zlib.compress(bytes(BODY_BYTES), 9)
    addresses = [pod["status"]["podIP"] for pod in operators(Api())]
    sent = 0

    def attack(host: str) -> None:
        nonlocal sent
        while not over.is_set():
            connection = http.client.HTTPConnection(host, 8080, timeout=20)
            try:
                connection.request("GET", "/healthz", body, {"Content-Encoding": "deflate"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
            finally:
                connection.close()
            sent += 1

    threads = [threading.Thread(target=attack, args=[host]) for host in addresses for _ in range(BODIES_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sent


ATTACKS: dict[str, Callable[[threading.Event], int]] = {
    "none": lambda over: not over.wait(),
    "mounts": lambda over: create(mounts, over),
    "unknown": lambda over: create(unknown, over),
    "stored": lambda over: create(stored, over),
    "churn": churn,
    "large": large,
    "asks": asks,
    "bodies": bodies,
}


def operators(api: Api) -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io%2Fname%3Dddpjob-operator"
    return list(api.ask("GET", path)["items"])


def restarts_of(operator: dict[str, Any]) -> int:
    return sum(s["restartCount"] for s in operator["status"].get("containerStatuses", ()))


def leads(api: Api) -> int:
    leases = api.ask("GET", "/apis/coordination.k8s.io/v1/leases")["items"]
    return sum(lease["spec"].get("leaseTransitions", 0) for lease in leases if "ddpjob" in lease["metadata"]["name"])


class Victim(threading.Thread):
    """Creates jobs of two failing pods one after the other, and records how long the first restart of each takes."""

    def __init__(self, image: str) -> None:
        super().__init__(daemon=True)
        container = CONTAINER | {"image": image, "imagePullPolicy": "IfNotPresent", "command": COMMAND}
        self.pod = {"containers": [container]}
        self.seconds: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        api, number = Api(), 0
        while not self.over.is_set():
            number += 1
            api.ask("POST", KIND.format(VICTIM), job(f"v{number}", self.pod, nodes=2, backoffLimit=1))
            ended = self._times(api, f"v{number}-1-", "terminated", "finishedAt", 1)
            started = self._times(api, f"v{number}-2-", "running", "startedAt", 2)
            # If the attack ends before the restart, count the time until now.
            if ended:
                self.seconds.append(max(started, default=time.time()) - min(ended))
            api.ask("DELETE", f"{KIND.format(VICTIM)}/v{number}")

    def _times(self, api: Api, names: str, state: str, key: str, count: int) -> list[float]:
        """Wait until `count` containers have reached a state. Return the times, in whole seconds after the epoch.

        `names` is a prefix of pod names. Return an empty list if the attack ends first.
        """
        while not self.over.wait(0.2):
            pods = api.ask("GET", f"/api/v1/namespaces/{VICTIM}/pods")["items"]
            states = [
                container["state"][state][key]
                for pod in pods
                if pod["metadata"]["name"].startswith(names)
                for container in pod["status"].get("containerStatuses", ())
                if state in container["state"]
            ]
            if len(states) >= count:
                return [datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() for text in states]
        return []


def under(attack: str, seconds: float, image: str) -> dict[str, Any]:
    api = Api()
    before = {"leads": leads(api), "restarts": sum(map(restarts_of, operators(api)))}
    over, made = threading.Event(), [0]
    attacker = threading.Thread(target=lambda: made.__setitem__(0, int(ATTACKS[attack](over))))
    victim = Victim(image)
    victim.start()
    attacker.start()
    time.sleep(seconds)
    victim.over.set()
    victim.join()
    over.set()
    attacker.join()
    return {
        "attack": attack,
        "requests": made[0],
        "restarts": len(victim.seconds),
        "mean": round(statistics.mean(victim.seconds), 1),
        "slowest": round(max(victim.seconds), 1),
        "leases lost": leads(api) - before["leads"],
        "operators restarted": sum(map(restarts_of, operators(api))) - before["restarts"],
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--image", default=IMAGE, help="of the failing job: any with a shell")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    options = parser.parse_args()
    api = Api()
    for name in (TENANT, VICTIM):
        api.ask("POST", "/api/v1/namespaces", json.dumps({"metadata": {"name": name}}).encode())
    try:
        for attack in options.attacks:
            print(json.dumps(under(attack, options.seconds, options.image)), flush=True)
            api.ask("DELETE", KIND.format(TENANT))
            while api.ask("GET", f"{KIND.format(TENANT)}?limit=1")["items"]:
                time.sleep(1)
    finally:
        for name in (TENANT, VICTIM):
            api.ask("DELETE", f"/api/v1/namespaces/{name}")


if __name__ == "__main__":
    main()
