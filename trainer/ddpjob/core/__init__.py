"""Rules that library, agents, operator and local run share: no I/O, no clock, no torch."""
