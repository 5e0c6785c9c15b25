"""A pod as a command with its variables, GPUs, threads, terminal and faults.

In:   pods that `ddpjob_operator.pods` has built, and the options of the command line.
Out:  the description of a process, or an error with the field and the fix.
Called by: the commands and local/run.py for all nodes before any starts, and processes/ for each start.
Must not start processes: a run must not fail halfway because of a field.
"""
