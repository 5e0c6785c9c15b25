"""The reports of a rank: its progress, its failure, and the heartbeat that ddprun's watchdog reads."""
