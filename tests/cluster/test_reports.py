"""Progress reports from pods: through the Service, with the kubelet's token, and with obstacles."""

import json

from pods import Space, job, trainer

# No torch, only the library's reporter.
TRAINS = """
import time
from ddpjob import progress
for step in range(1, 13):
    progress(step, total=12)
    time.sleep(0.75)
time.sleep(6)  # reports go every 5 s; the last word at the end has one second
print("trained", flush=True)
"""
POSTS = """
import http.client, json, os, sys, time, urllib.parse
url = urllib.parse.urlsplit(os.environ["DDPJOB_STATUS_URL"])
token = open(os.environ["DDPJOB_STATUS_TOKEN_FILE"]).read()
account = open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()
header, claims, signature = token.split(".")
def posted(body, token):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
    try:
        connection.request("POST", url.path, body, {"Authorization": "Bearer " + token})
        return connection.getresponse().status
    except ConnectionError:
        return 413  # cut off in the middle of the body
    finally:
        connection.close()
        time.sleep(1.2)  # one a second and pod is taken
for body, by, status in [
    (b"{", token, 400),
    (bytes(range(256)), token, 400),
    (b"[" * 8000, token, 400),
    (b" " * 2**20, token, 413),
    (b'{"step": 3}', account, 401),
    (b'{"step": 3}', header + "." + claims + "." + signature[::-1], 401),
    (b'{"step": 3}', "", 401),
]:
    got = posted(body, by)
    assert got == status, (body[:20], got, status)
assert posted(json.dumps({"step": 7, "totalSteps": 9, "rank": 0, "job": "victim", "name": "victim"}), token) < 300
print("posted", flush=True)
"""


def test_a_job_with_blocked_progress_reports_still_succeeds(space: Space) -> None:
    blocked = {
        "unresolved": ("DDPJOB_STATUS_URL", "http://no-such-service.invalid:8081/", ""),
        "unreachable": ("DDPJOB_STATUS_URL", "http://192.0.2.1:8081/", ""),  # a reserved address
        "closed": ("DDPJOB_STATUS_URL", "http://127.0.0.1:9/", "Connection refused"),
        "unbelieved": (
            "DDPJOB_STATUS_TOKEN_FILE",
            "/var/run/secrets/kubernetes.io/serviceaccount/token",
            "answered 401",
        ),
        "without-token": ("DDPJOB_STATUS_TOKEN_FILE", "/nowhere", "FileNotFoundError"),
    }
    space.kubectl("apply", "-f", "-", stdin=job("open", TRAINS, nodes=1))
    for name, (variable, value, _) in blocked.items():
        body = job(name, TRAINS, nodes=1)
        trainer(body)["env"] = [{"name": variable, "value": value}]
        space.kubectl("apply", "-f", "-", stdin=body)
    assert space.reaches("open", "Succeeded")["progress"]["step"] == 12, "nothing is in the way of this one"
    for name, (_, _, why) in blocked.items():
        status = space.reaches(name, "Succeeded")
        assert "progress" not in status, name
        assert status.get("lastFailure") is None, f"{name}: {json.dumps(status['lastFailure'])}"
        log = space.kubectl("logs", f"{name}-1-0")
        assert "trained" in log
        assert log.count("ddpjob: progress is not reported: ") == 1, log
        assert why in log, log


def test_invalid_reports_are_refused_and_a_job_can_report_only_for_itself(space):
    space.kubectl("apply", "-f", "-", stdin=job("victim", "import time; time.sleep(1000)", nodes=1))
    space.reaches("victim", "Running")
    space.kubectl("apply", "-f", "-", stdin=job("posting", POSTS, nodes=1, backoffLimit=0))
    status = space.reaches("posting", "Succeeded")
    assert status["progress"]["step"] == 7
    assert "progress" not in space.status("victim")
