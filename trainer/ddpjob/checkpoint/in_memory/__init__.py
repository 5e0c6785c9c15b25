"""Keep the state of a training in its node's shared memory, so that it outlives the rank. Entry point: door.py.

Words in the names of this package:

    boundary    the end of a step: the script calls `should_stop(step)`, `keep` or `save`, and the state is complete
    named       passed to `save` or `keep`, which get the whole state; `should_stop` gets only the step number
    assumed     the state is what `load` was given, because the script has called neither `save` nor `keep`
    large       parameters and optimizer state; small values are random states, buffers, settings and plain values
    slot        part of the shared memory that has the small values of one rank at one step
    area        part of the shared memory that has the large values of the whole node
    proven      checked at some steps: only an optimizer changes large values between two optimizer steps
    survivor    a rank that is alive after another rank has failed, and writes its large values
    copy        the large values, written every few steps because no survivor could write them
"""
