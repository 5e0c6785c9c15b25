"""A job as processes on this machine."""
