"""Jobs that cannot work, on real kubelets: the status names the reason and how to fix it."""

from pods import Space, job, trainer

# The library writes the exception to the termination message, where other output cannot hide it.
# Without the message only the log's end is known, in which stdout may follow the traceback.
NOISE = rb"""
import os, sys
import ddpjob
ddpjob.progress(step=1)
out = sys.stdout.buffer
for n in range(20_000): out.write(b"step %d\n" % n)
out.write(b"x" * 10_000_000 + b"\n")
out.write(bytes(range(256)) * 8 + b"\n")
out.flush()
if os.environ["RANK"] == "1": raise ValueError("no such shard: 7")
import time; time.sleep(1000)
""".decode()


def test_a_missing_image_is_reported_while_the_job_waits_for_it(space: Space) -> None:
    body = job("unpullable", nodes=1)
    trainer(body)["image"] = "registry.invalid/no-such-image:1"
    space.kubectl("apply", "-f", "-", stdin=body)
    status = space.waits("unpullable", lambda s: s.get("reason") == "CannotStart", "the status says so", 60)
    assert "unpullable-1-0" in status["message"]
    assert "registry.invalid/no-such-image:1" in status["message"]
    assert status["state"] != "Failed", "a registry may come back"


def test_a_missing_command_fails_the_job_and_is_named(space: Space) -> None:
    body = job("mistyped", nodes=1, backoffLimit=0)
    trainer(body)["command"] = ["trochrun", "train.py"]
    space.kubectl("apply", "-f", "-", stdin=body)
    assert "trochrun" in space.reaches("mistyped", "Failed")["message"]


def test_a_rank_that_fails_after_much_output_is_still_reported_with_its_exception(space: Space) -> None:
    """A rank that fails after much output, such as a line of 10 MB, must be reported with its exception."""
    space.kubectl("apply", "-f", "-", stdin=job("noisy", NOISE, backoffLimit=0))
    status = space.reaches("noisy", "Failed")
    assert "rank 1 (pod noisy-1-1" in status["message"]
    assert "ValueError: no such shard: 7" in status["message"]
    assert len(status["message"]) < 2_000
    assert "no such shard" in space.kubectl("describe", "ddp", "noisy")
