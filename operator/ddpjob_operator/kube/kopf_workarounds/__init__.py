"""Everything that is here only because kopf 1.45 watches the DDPJobs: a file for each, which says what kopf does, what
users would see, and when it can go. With a Reflector for DDPJobs, as pods and Services have one, all of it could go.

reading_session      a DDPJob that kopf cannot read does not end the operator
error_backoffs       an API server that is away does not end it either
login_pace           credentials that are refused are not read again at once
log_stacks           an answer of the API server is logged without kopf's stacks
log_retries          an API server that is away is one line a minute

Three more are lines elsewhere. handlers.py sets the stop flag before it stops the operator, because kopf waits 5 s for
a task of its own that waits for that flag (kopf 1.45, reactor/running.py), and gives each login an expiration of its
own; health.py answers /healthz in place of kopf's probe.
"""
