"""Output of a local run: the live table, plain lines for a pipe, the use of CPUs and GPUs."""
