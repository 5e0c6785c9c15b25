"""Cost of the trainer library in a training loop: progress() on its fast path, should_stop() and the sampler per step;
check_replicas() per million parameters.

    python bench/trainer_overhead.py            # PYTHONPATH=trainer, or with the package installed

Each figure is the best of 100 short rounds, because other work on the machine can only add time. A receiver on loopback
answers while progress() is measured, so that the posting thread is active too.
"""

import os
import tempfile
import threading
import timeit
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import common
import torch
from torch.multiprocessing import spawn

import ddpjob

STEP_SECONDS = 0.005
ROUNDS, CALLS = 100, 2_000


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Suppress the server's log lines."""


def best_seconds(work: Callable[[], object], units: int = 1) -> float:
    """Return the least seconds of one of the `units` of work that work() does."""
    return min(timeit.repeat(work, number=1, repeat=ROUNDS)) / units


def sampler_seconds(n: int, global_batch: int) -> float:
    """Return the seconds of a step of a sampler."""
    sampler = ddpjob.GlobalBatchSampler(n, global_batch, 7, rank=0, world_size=2)
    steps = len(list(sampler.epoch(0)))
    return best_seconds(lambda: list(sampler.epoch(0)), steps)


def check_replicas(rank: int, folder: str) -> None:
    """Write the seconds per parameter of a model of many tensors, like a ResNet."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(160)))
    with ddpjob.init("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2):
        for tensor in model.parameters():
            torch.nn.init.ones_(tensor)
        took = best_seconds(lambda: ddpjob.check_replicas(model), sum(p.numel() for p in model.parameters()))
    Path(folder, str(rank)).write_text(str(took))


def main() -> None:
    print(common.machine())
    with tempfile.TemporaryDirectory() as folder:
        spawn(check_replicas, (folder,), nprocs=2)
        slowest = max(float(Path(folder, str(rank)).read_text()) for rank in (0, 1))
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["DDPJOB_STATUS_URL"] = f"http://127.0.0.1:{server.server_port}/"
    steps = range(CALLS)
    rows = {
        "progress()": best_seconds(lambda: [ddpjob.progress(n, CALLS, 64, loss=0.5) for n in steps], CALLS),
        "should_stop()": best_seconds(lambda: [ddpjob.should_stop(n) for n in steps], CALLS),
        "sampler, 1,440 samples, 32 a step": sampler_seconds(1_440, 32),
        "sampler, 100,000 samples, 64 a step": sampler_seconds(100_000, 64),
    }
    print(f"{'':36}{'ns':>9}{'of a 5 ms step':>17}")
    for name, each in rows.items():
        print(f"{name:36}{each * 1e9:9.0f}{each / STEP_SECONDS:16.4%}")
    print(f"check_replicas(), 2 ranks: {slowest * 1e9:.2f} ms per million parameters")


if __name__ == "__main__":
    main()
