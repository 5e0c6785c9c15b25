"""Fixtures: a fake API server, and `ddpjob` in this process with that server."""

from command_line import cluster, ddpjob

__all__ = ["cluster", "ddpjob"]
