"""Is a node too slow to train with the others? Measured before training: `python -m ddpjob.preflight`, or `run()`."""

from ddpjob.preflight.measure import run

__all__ = ["run"]
