"""Workarounds for kopf (seen with 1.45.2), one per file. Each describes what kopf does, what users would see, and when
the workaround can be removed.

reflected_session    keeps the watch of DDPJobs going after any answer of the API server
own_tasks            ends the operator when a task of kopf ends

Two more workarounds are single lines in other files. handlers.py sets the stop flag before it stops the operator:
otherwise kopf waits 5 s for its own "stop-flag waiter" task (kopf/_core/reactor/running.py, lines 413 and 439).
ports/bounded_server.py replaces kopf's probe.
"""
