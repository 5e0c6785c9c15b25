"""The next actions of a job.

In:   a job with its status, everything that is observed of it, the time, settings.
Out:  the new status, actions, events, when to plan again. The caller carries them out in this order.
Called by: kube/work for pods, `ddpjob_cli.local` for processes, tests for a model of both.
Must not know who carries out its actions. It may run again on older observations and must then do no harm.
"""
