"""Requests to the API server, as raw dicts.

In:   paths, bodies, credentials.
Out:  dicts of limited depth and size, because users write them. Errors are `ApiError`.
Called by: all of kube/. Time and randomness come from a `Runtime`, which the simulation replaces.
Must not know jobs' states or plans. A write for a job is sent only under the Lease.
"""
