"""A pod as a command with its variables, GPUs, threads, terminal and faults, checked before any node starts."""
