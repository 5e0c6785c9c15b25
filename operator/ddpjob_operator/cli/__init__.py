"""The command line `ddpjob`."""
