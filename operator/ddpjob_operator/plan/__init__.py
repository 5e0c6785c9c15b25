"""The next actions of a job, in four phases: sort what is observed, record what became true, decide, finish."""
