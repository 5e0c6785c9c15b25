"""The operator in a cluster, with all of its I/O.

In:   objects and changes from the API server, reports of pods, settings from the environment.
Out:  requests to the API server, metrics, logs, an exit code.
Called by: `ddpjob-operator`. kopf calls handlers.py. Only the holder of the Lease acts on jobs.
Must not decide about jobs: what becomes of a job follows from plan(), so that the simulation tests it.
"""
