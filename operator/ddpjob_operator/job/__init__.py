"""The DDPJob resource.

In:   documents that users write, as parsed YAML or JSON.
Out:  typed specs and statuses, problems with field, value and fix, the CRD, facts that follow from a spec alone.
Called by: everything in this wheel but the agent and the library.
Must not know what is observed, in a cluster or on this machine.
"""
