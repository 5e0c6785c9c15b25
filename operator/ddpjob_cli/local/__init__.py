"""The local shell: a job as processes on this machine."""
