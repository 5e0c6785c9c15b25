"""State that outlives the process: snapshots, and a check that all ranks hold the same state."""
