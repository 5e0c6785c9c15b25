"""A job's pods as running processes, in place of an API server and kubelets.

In:   actions of plan(), processes that preparation/ has described, requests such as Ctrl-C or `ddpjob stacks`.
Out:  the same observations that the operator makes of pods; the output of the nodes.
Called by: the loop of local/run.py, which nothing here may block. The commands use stacks.py and saves.py.
Must not print, and must not leave a process behind, even if the run is killed.
"""
