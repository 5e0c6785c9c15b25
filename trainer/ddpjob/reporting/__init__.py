"""What a rank says: progress, its end, and the heartbeat that a watchdog reads."""
