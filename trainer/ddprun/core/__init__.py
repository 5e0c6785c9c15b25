"""What an agent decides: no I/O, no clock, no processes."""
