"""The work on a job: it is queued, looked up, planned, and the plan is carried out and told."""
