"""What a failure was: termination messages and logs read, and the root cause found."""
