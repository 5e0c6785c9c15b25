"""Everything that is here only because kopf 1.45 watches the DDPJobs: a file for each, which says what kopf does, what
users would see, and when it can go.

reflected_session    no answer of the API server ends the watch of the DDPJobs
own_tasks            a task of kopf that has ended ends the operator

Two more are lines elsewhere: handlers.py sets the stop flag before it stops the operator, because kopf waits 5 s for a
task of its own that waits for that flag (kopf 1.45, reactor/running.py), and health.py answers /healthz in place of
kopf's probe.
"""
