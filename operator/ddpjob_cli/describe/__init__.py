"""A job's status as text for people: `ddpjob describe`, tables, and the line at the end of a run. Pure: a status and
the time in, lines out. No terminal codes; the caller removes control characters."""
