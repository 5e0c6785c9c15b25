"""A job's pods as processes of this machine: started, watched, signalled; faults, reports, stacks."""
