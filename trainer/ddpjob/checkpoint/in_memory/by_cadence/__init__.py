"""Copies of the state, written every few steps because no surviving rank could write it after a failure.

In:   a `Boundary`: the kept objects at the end of a step.
Out:  valid copies in the areas and slots of the node's shared memory (`shared.py`).
Called by: `memory.py` at each end of a step, and `survivor.py` after a failure.
Must not decide which state a restart loads: `recall.py` does.
"""
