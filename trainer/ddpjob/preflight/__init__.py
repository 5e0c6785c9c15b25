"""Are these nodes fit to train together? Measured before training: `python -m ddpjob.preflight`, or `run()`."""

from ddpjob.preflight.measure import run

__all__ = ["run"]
