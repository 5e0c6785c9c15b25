"""A job's status as text for people: `ddpjob describe`, tables, and the line at the end of a run. Pure functions of a
status and the time. They add no terminal codes; the caller removes control characters."""
