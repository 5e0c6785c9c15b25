"""The decisions of an agent, without I/O, clock or processes."""
