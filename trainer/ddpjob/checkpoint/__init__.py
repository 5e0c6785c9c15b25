"""State that outlives the process: in a folder, and in the memory of the node.

In:   the objects that a script passes to `Snapshot`.
Out:  files that `torch.load(weights_only=True)` reads, restored objects, `check_replicas`.
Called by: scripts, through the names in `ddpjob`.
Must not depend on the agent: without `ddprun` there is only the folder. The agent and the library share the layout of
the memory in `ddpjob_core`.
"""
