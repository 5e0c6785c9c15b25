"""What a failure was: reads termination messages and logs, finds the root cause, and says it in a sentence."""
