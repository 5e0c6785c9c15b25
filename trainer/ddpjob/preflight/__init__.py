"""Finds nodes that are too slow to train with the others, before training: `python -m ddpjob.preflight`, or `run()`."""

from ddpjob.preflight.measure import run

__all__ = ["run"]
