"""Everything that is here only because kopf 1.45 watches the DDPJobs. With a Reflector for DDPJobs, as pods and
Services have one, all of it could go; each file also says which change of kopf would do.

session      a DDPJob that is nested too deep or too large ends neither kopf's watch nor the process
backoffs     kopf asks the API server for ever, and does not log in in a tight loop
sweep        a job that was deleted while kopf's watch was broken is forgotten
log_filter   an answer of the API server is one line of the log, without kopf's stacks

Three more are lines elsewhere. handlers.py sets the stop flag before it stops the operator, because kopf waits 5 s for
a task of its own that waits for that flag (kopf 1.45, reactor/running.py), and gives each login an expiration of its
own; health.py answers /healthz in place of kopf's probe.
"""
