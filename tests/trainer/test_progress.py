"""progress() sends reports to a receiver. Training must not be affected if nobody receives them."""

import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import socket
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from free_port import free_port

import ddpjob
from ddpjob import process
from ddpjob.reporting.sender import ReportSender

progress_file = importlib.import_module("ddpjob.reporting.progress")


def test_the_first_and_the_last_values_always_arrive(receiver, monkeypatch):
    monkeypatch.setenv("DDPJOB_STATUS_INTERVAL", "3600")
    ddpjob.progress(1, total=10, loss=2.5)
    first = receiver.next()
    ddpjob.progress(2, total=10)
    ddpjob.progress(10, total=10, loss=0.5)
    progress_file.flush()
    last = receiver.next()
    assert (first["step"], first["final"], first["metrics"]) == (1, False, {"loss": "2.5"})
    assert (last["step"], last["final"], last["metrics"]) == (10, True, {"loss": "0.5"})


def test_a_report_contains_rank_progress_and_pace(receiver, monkeypatch):
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DDPJOB_ATTEMPT", "3")
    ddpjob.progress(100, total=1100, samples=64)
    first = receiver.next()
    assert first == {
        "attempt": 3, "rank": 2, "nodeRank": 1, "worldSize": 4, "step": 100, "totalSteps": 1100, "metrics": {},
        "final": False,
    }  # fmt: skip
    ddpjob.progress(200, total=1100, samples=64)
    second = next(post for post in iter(receiver.next, None) if post["step"] == 200)
    assert second["samplesPerSecond"] > 64
    assert second["etaSeconds"] >= 0


def test_a_rank_reports_before_its_first_step_and_reports_that_step_at_once(receiver, run_ranks, monkeypatch):
    """A rank must report before its first step, so that imports and a large snapshot do not count as a stall."""
    monkeypatch.setenv("DDPJOB_STATUS_INTERVAL", "3600")

    def body(rank: int) -> None:
        with ddpjob.init():
            receiver_said("start", 0)
            progress_file.report_start(77)
            receiver_said("start", 77)
            ddpjob.progress(78, total=100)
            receiver_said(None, 78)
            progress_file.report_start(5)
            progress_file.flush()

    def receiver_said(phase: str | None, step: int) -> None:
        post = posts.get(timeout=20)
        assert (post.get("phase"), post["step"]) == (phase, step), post

    posts = multiprocessing.get_context("fork").Queue()
    threading.Thread(target=lambda: [posts.put(receiver.next()) for _ in range(4)], daemon=True).start()
    run_ranks(body, 1)
    last = posts.get(timeout=20)
    assert (last["step"], last.get("phase"), last["final"]) == (78, None, True), "what was said before the step is past"


def test_a_rank_without_a_step_keeps_reporting(receiver):
    ddpjob.progress(41)
    assert [receiver.next()["step"] for _ in range(10)] == [41] * 10


def test_a_declared_pause_is_reported_until_it_ends(receiver):
    def phase_is(phase: str | None) -> None:
        while receiver.next().get("phase") != phase:
            pass

    ddpjob.progress(41)
    phase_is(None)
    with ddpjob.pause("evaluate"):
        phase_is("evaluate")
        with ddpjob.pause("save"):
            phase_is("save")
        phase_is("evaluate")
    phase_is(None)
    with contextlib.suppress(ZeroDivisionError), ddpjob.pause("save"):
        raise ZeroDivisionError
    phase_is(None)
    with pytest.raises(ddpjob.ConfigurationError, match="phase: 'lunch' is none of save, evaluate"):
        ddpjob.pause("lunch").__enter__()


def test_the_time_before_the_first_step_does_not_count_as_a_slow_step(receiver):
    progress_file.report_start()
    assert "samplesPerSecond" not in receiver.next()
    began = progress_file.monotonic()
    ddpjob.progress(1, samples=10)
    while (post := receiver.next()).get("phase"):
        pass
    ddpjob.progress(2, samples=10)
    while (post := receiver.next())["step"] < 2:
        pass
    assert post["samplesPerSecond"] >= 0.99 * 10 / (progress_file.monotonic() - began)


def test_rates_are_computed_from_step_times_and_not_from_report_times():
    reporter = progress_file.Reporter("http://x", {})
    assert reporter.steps_per_second(100, 50.0) is None
    assert reporter.steps_per_second(300, 60.0) == 20.0
    assert reporter.steps_per_second(300, 60.0) == 20.0, "a post without a new step is no slow-down"
    pace = progress_file.pace(20.0, 300, 1100, 64)
    assert pace == {"totalSteps": 1100, "etaSeconds": 40, "samplesPerSecond": 1280.0}


def test_only_the_first_rank_of_a_node_reports(receiver, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ddpjob.progress(1)
    assert process.current.reporter is None


def test_only_the_first_of_several_ranks_started_by_a_script_in_one_pod_reports(
    receiver, run_ranks, monkeypatch, meeting_file
):
    """Of several ranks that a script starts in a pod, only the first may report: all inherit its variables."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))

    def body(rank: int) -> bool:
        torch.distributed.init_process_group("gloo", init_method=meeting_file, rank=rank, world_size=4)
        ddpjob.progress(1)
        return any(thread.name == "ddpjob-progress" for thread in threading.enumerate())

    assert run_ranks(body, 4) == [True, False, False, False]


def test_the_token_is_read_for_every_report_because_the_kubelet_renews_it(receiver, tmp_path):
    ddpjob.progress(1)
    assert receiver.posts.get(timeout=20)[1]["Authorization"] == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    while receiver.posts.get(timeout=20)[1]["Authorization"] != "Bearer second":
        pass


def test_proxy_variables_are_ignored(receiver, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    ddpjob.progress(5)
    assert receiver.next()["step"] == 5


def test_a_refusing_receiver_is_mentioned_once_and_tried_again_later(receiver, capfd):
    receiver.answers = [401, 500, 302]
    ddpjob.progress(7)
    for _ in range(4):
        assert receiver.next()["step"] == 7
    said = capfd.readouterr().err
    assert said.count("ddpjob:") == 1
    assert receiver.url in said
    assert "401" in said


def test_a_line_of_the_library_is_one_write(monkeypatch):
    """A log line must be one write, so that lines of ranks do not mix. `print` under `python -u` makes two writes."""

    class Written(list):
        write = list.append

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", written := Written())
    process.log("resumed at step 7")
    assert written == ["ddpjob: resumed at step 7\n"]


@pytest.fixture
def certificate(tmp_path):
    """Return a certificate for localhost, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = serialization.Encoding.PEM
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "certificate.pem"
    path.write_bytes(own + made.sign(key, hashes.SHA256()).public_bytes(pem))
    return str(path)


def answer_and_close(server: socket.socket, context: ssl.SSLContext | None, closed: threading.Event) -> None:
    """Answer each POST with keep-alive, and then close the connection anyway."""
    with contextlib.suppress(OSError):
        while True:
            connection = server.accept()[0]
            connection = context.wrap_socket(connection, server_side=True) if context else connection
            while not connection.recv(65536).endswith(b"{}"):
                pass
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            connection.close()
            closed.set()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_connection_closed_by_the_receiver_loses_no_report(certificate, scheme):
    """A connection that the receiver closes, also with TLS, must not lose or delay the next report."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if scheme == "https" else None
    if context is not None:
        context.load_cert_chain(certificate)
    with socket.create_server(("localhost", 0)) as server:
        closed = threading.Event()
        threading.Thread(target=answer_and_close, args=[server, context, closed], daemon=True).start()
        url = f"{scheme}://localhost:{server.getsockname()[1]}/"
        sender = ReportSender(url, {"DDPJOB_STATUS_CA_FILE": certificate})
        for _ in range(3):
            assert sender.send(b"{}") is None
            assert closed.wait(20)
            closed.clear()
        sender.close()
        server.shutdown(socket.SHUT_RDWR)  # this wakes the thread in accept()


def test_waits_between_retries_double_up_to_a_minute():
    reporter = progress_file.Reporter("http://x", {"DDPJOB_STATUS_INTERVAL": "5"})
    pauses = []
    for reporter.failures in (0, 1, 2, 3, 4, 5, 1000):
        pauses.append(reporter.pause_seconds())
    assert pauses == [5, 10, 20, 40, 60, 60, 60]


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "http://127.0.0.1:1/", "http://", "nonsense", "http://127.0.0.1:notaport/"]
)
def test_an_unreachable_address_does_not_disturb_the_training(monkeypatch, capfd, url):
    monkeypatch.setenv("DDPJOB_STATUS_URL", url)
    ddpjob.progress(1, loss=1.0)
    ddpjob.progress(2, loss=1.0)
    progress_file.flush(5)
    process.replace()
    assert "Traceback" not in capfd.readouterr().err


def test_without_a_receiver_no_thread_is_started():
    before = threading.active_count()
    ddpjob.progress(1, total=2, loss=0.5)
    ddpjob.progress(2, total=2, loss=0.5)
    assert threading.active_count() == before
    process.replace()


class Hostile:
    def __float__(self) -> float:
        raise RuntimeError("no number")


def test_metrics_become_short_strings_and_unsupported_values_are_omitted():
    said = progress_file.as_text(
        {
            "loss": 0.4123456789, "nan": float("nan"), "inf": float("-inf"), "epoch": 3, "tensor": torch.tensor(1.5),
            "text": "x" * 100, "bad": Hostile(), "many": torch.zeros(3), "none": None,
        }
    )  # fmt: skip
    assert said == {
        "loss": "0.412346", "nan": "nan", "inf": "-inf", "epoch": "3", "tensor": "1.5", "text": "x" * 64,
    }  # fmt: skip
    assert len(progress_file.as_text({f"m{i}": i for i in range(40)})) == 16


@pytest.mark.parametrize(
    ("step", "metrics", "said"),
    [
        (3, {"loss": 0.5, "tensor": torch.tensor([2.0])}, ""),
        ("7", {}, ""),
        ("ten", {}, "step: 'ten' is not a number, so nothing is reported"),
        (3, {"loss": torch.zeros(3)}, "loss: a Tensor of 3 elements is not one number or text, so it is not shown"),
        (3, {"best": None}, "best: a NoneType is not one number or text, so it is not shown"),
        (3, {f"m{i}": i for i in range(30)}, "30 metrics are more than 16: the others are not shown"),
    ],
)
def test_a_metric_that_is_not_shown_is_named(step, metrics, said):
    """A metric that is not shown, such as a loss with three elements, must be named with the reason."""
    assert progress_file.misuse(step, metrics) == said


def test_a_wrong_argument_is_named_once_and_training_continues(receiver, capfd):
    ddpjob.progress(1, loss=torch.zeros(3))
    ddpjob.progress(2, loss=torch.zeros(3))
    progress_file.flush()
    assert capfd.readouterr().err.count("ddpjob: progress(): loss: a Tensor of 3 elements") == 1


def test_a_loss_with_a_gradient_is_a_metric_without_a_warning(recwarn):
    """A loss that requires a gradient must be reported without torch's warning of four lines on each rank."""
    loss = torch.tensor([2.5], requires_grad=True).sum()
    assert progress_file.as_text({"loss": loss}) == {"loss": "2.5"}
    assert list(recwarn) == []


def test_a_report_is_at_most_8_kibibytes_of_valid_json():
    metrics = progress_file.as_text({f"{i:02}" + "é漢𝄞"[i % 3] * 100: "𝄞" * 100 for i in range(16)})
    body = progress_file.encode({"step": 1, "metrics": metrics})
    assert len(body) <= 8192
    assert json.loads(body)["metrics"]


@pytest.mark.parametrize("group", ["none", "one rank", "left"])
def test_only_a_rank_without_a_group_reports_that_it_trained_alone(receiver, run_ranks, monkeypatch, group):
    """A rank without a process group must report that it trained alone, because torchrun does not notice this."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist, port = torch.distributed, free_port()

    def body(rank: int) -> None:
        if group == "one rank":  # each rank forms a group of one
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        elif group == "left":
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            dist.destroy_process_group()
        torch.ones(1, requires_grad=True).sum().backward()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        ddpjob.progress(41)

    run_ranks(body, 2)
    last = next(post for post in iter(receiver.next, None) if post["final"])
    assert last.get("alone", False) is (group != "left")


def test_a_forked_process_reports_for_itself(receiver, run_ranks):
    ddpjob.progress(1)
    assert receiver.next()["step"] == 1
    run_ranks(lambda rank: ddpjob.progress(41), 1)
    while receiver.next() != {**receiver_document(41), "final": True}:
        pass


def receiver_document(step: int) -> dict[str, Any]:
    return {"attempt": 1, "rank": 0, "nodeRank": 0, "worldSize": 1, "step": step, "metrics": {}, "final": False}


def test_importing_the_library_and_reporting_do_not_need_torch(run_python):
    run_python(
        "import sys, ddpjob, ddpjob.reporting.progress, ddpjob.errors\n"
        "ddpjob.progress(1, loss=0.5)\n"
        "from ddpjob.reporting.progress import progress\n"
        "assert ddpjob.progress is progress and callable(ddpjob.progress)\n"
        "assert 'torch' not in sys.modules and 'http.client' not in sys.modules\n"
        "assert {n for n in dir(ddpjob) if n[:2] != '__'} == set(ddpjob.__all__)\n"
    )


@pytest.fixture
def run_python() -> Any:
    import subprocess

    def run(code: str) -> None:
        folder = str(Path(ddpjob.__file__).parents[1])
        subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": folder}, timeout=60)

    return run
