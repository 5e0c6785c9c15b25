"""State that outlives the process: snapshots, and whether all ranks hold the same."""
