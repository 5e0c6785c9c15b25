"""What the trainer library costs in a training loop: progress() on its fast path, should_stop() and the
sampler, per step.

    python bench/trainer_overhead.py            # PYTHONPATH=trainer, or with the package installed

Each figure is the best of 7 rounds, because other work on the machine only ever adds; a receiver on loopback answers
while progress() is measured, so that the posting thread is at work too.
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

STEP_SECONDS = 0.005
ROUNDS = 7


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def best_seconds(work: Callable[[], int]) -> float:
    """Seconds of one unit: work() returns how many it did."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        units = work()
        rounds.append((time.perf_counter() - begin) / units)
    return min(rounds)


def progress_calls(calls: int = 200_000) -> int:
    import ddpjob

    progress = ddpjob.progress
    for step in range(calls):
        progress(step, calls, 64, loss=0.5)
    return calls


def should_stop_calls(calls: int = 200_000) -> int:
    import ddpjob

    should_stop = ddpjob.should_stop
    for step in range(calls):
        should_stop(step)
    return calls


def sampler_steps(n: int, global_batch: int) -> Callable[[], int]:
    import ddpjob

    sampler = ddpjob.GlobalBatchSampler(n, global_batch, 7, rank=0, world_size=2)

    def one_epoch() -> int:
        return sum(1 for _ in sampler.epoch(sampler.current_epoch))

    return one_epoch


def main() -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, load {os.getloadavg()[0]:.1f}")
    rows = [("progress(), no receiver", best_seconds(progress_calls))]
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["DDPJOB_STATUS_URL"] = f"http://127.0.0.1:{server.server_port}/"
    from ddpjob.progress import flush

    flush()
    rows.append(("progress(), posting every 5 s", best_seconds(progress_calls)))
    rows.append(("should_stop()", best_seconds(should_stop_calls)))
    rows.append(("sampler, 1,440 samples, 32 a step", best_seconds(sampler_steps(1440, 32))))
    rows.append(("sampler, 100,000 samples, 64 a step", best_seconds(sampler_steps(100_000, 64))))
    print(f"{'':36}{'ns':>9}{'of a 5 ms step':>17}")
    for name, seconds in rows:
        print(f"{name:36}{seconds * 1e9:9.0f}{seconds / STEP_SECONDS:16.4%}")


if __name__ == "__main__":
    main()
