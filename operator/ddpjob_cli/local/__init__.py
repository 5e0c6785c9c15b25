"""A job as processes on this machine.

In:   a valid DDPJob, options of `ddpjob run` or `ddpjob dev`, signals, keys.
Out:  processes, a run folder, lines or a table on the screen, the status of the job.
Called by: `run`, `dev` and the commands that read earlier runs; `ddpjob.run`.
Must not decide what becomes of a job: plan() does. Must not import torch or a Kubernetes client: a run starts at once.
"""
