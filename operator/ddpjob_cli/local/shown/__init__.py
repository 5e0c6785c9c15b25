"""What a local run shows: the table that lives, one line at a time for a pipe, the use of the machine."""
