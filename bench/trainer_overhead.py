"""Cost of the trainer library in a training loop: progress() on its fast path, should_stop() and the sampler per step;
check_replicas() per million parameters.

    python bench/trainer_overhead.py            # PYTHONPATH=trainer, or with the package installed

Each figure is the best of 300 short rounds, because other work on the machine can only add time. A receiver on loopback
answers while progress() is measured, so that the posting thread is active too.
"""

import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

STEP_SECONDS = 0.005
ROUNDS = 300


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Suppress the server's log lines."""


def best_seconds(work: Callable[[], int]) -> float:
    """Return the least seconds of one unit of work; work() returns the number of units that it did."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        units = work()
        rounds.append((time.perf_counter() - begin) / units)
    return min(rounds)


def progress_calls(calls: int = 2_000) -> int:
    import ddpjob

    progress = ddpjob.progress
    for step in range(calls):
        progress(step, calls, 64, loss=0.5)
    return calls


def should_stop_calls(calls: int = 2_000) -> int:
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


def check_replicas_seconds(world_size: int = 2, layers: int = 160, width: int = 256) -> tuple[float, int]:
    """Return the slowest rank's seconds on a model of many tensors, like a ResNet, and the number of parameters."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:

        def one_rank(rank: int) -> None:
            import torch

            import ddpjob

            torch.set_num_threads(1)
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
            with ddpjob.init("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size):
                for tensor in model.parameters():
                    torch.nn.init.ones_(tensor)

                def check() -> int:
                    ddpjob.check_replicas(model)
                    return 1

                answers.put((best_seconds(check), sum(p.numel() for p in model.parameters())))

        ranks = [context.Process(target=one_rank, args=(rank,)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        slowest = max(answers.get() for _ in ranks)
        for rank in ranks:
            rank.join()
        return slowest


def main() -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, load {os.getloadavg()[0]:.1f}")
    seconds, parameters = check_replicas_seconds()  # first, because it forks: later measurements start threads
    rows = [("progress(), no receiver", best_seconds(progress_calls))]
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["DDPJOB_STATUS_URL"] = f"http://127.0.0.1:{server.server_port}/"
    from ddpjob.reporting.progress import flush

    flush()
    rows.append(("progress(), posting every 5 s", best_seconds(progress_calls)))
    rows.append(("should_stop()", best_seconds(should_stop_calls)))
    rows.append(("sampler, 1,440 samples, 32 a step", best_seconds(sampler_steps(1440, 32))))
    rows.append(("sampler, 100,000 samples, 64 a step", best_seconds(sampler_steps(100_000, 64))))
    print(f"{'':36}{'ns':>9}{'of a 5 ms step':>17}")
    for name, each in rows:
        print(f"{name:36}{each * 1e9:9.0f}{each / STEP_SECONDS:16.4%}")
    per_million = seconds / parameters * 1e9
    print(f"check_replicas(), 2 ranks, {parameters / 1e6:.1f} million parameters: {per_million:.2f} ms per million")


if __name__ == "__main__":
    main()
