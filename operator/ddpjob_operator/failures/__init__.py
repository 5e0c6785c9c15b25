"""Reads termination messages and logs, finds the root cause of a failure, and describes it in a sentence."""
