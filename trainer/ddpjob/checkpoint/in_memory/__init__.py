"""State that outlives its rank: kept at each step, copied, written by a survivor, found again. door.py: the way in."""
