"""What a rank reports: its progress, its failure, and the heartbeat that ddprun's watchdog reads."""
