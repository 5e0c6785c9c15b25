"""Work on single jobs: from a key in the queue to requests and log lines.

In:   keys of jobs that changed or are due, the objects that watch/ stores, reports that ports/ receives.
Out:  requests through api/, the time of the next reconcile.
Called by: `Operator`, while it holds the Lease. A job is worked on by one task at a time.
Must not know how objects arrive, and must not keep what a new leader needs: that belongs in the status.
"""
