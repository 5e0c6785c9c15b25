"""State that outlives its rank: it is kept at each step, copied, or written by a survivor. Entry point: door.py."""
