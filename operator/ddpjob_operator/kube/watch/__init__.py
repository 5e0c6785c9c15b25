"""A copy of the cluster's objects that is kept up to date.

In:   lists and watch events from api/, and answers to our own requests.
Out:  the objects of a job in the types of `observed`, and one call per change that needs a reconcile.
Called by: `Operator` starts the reflectors; work/ reads the store. Standbys keep their copy up to date as well.
Must not send writes. An object is cut when it arrives: a rule that needs another field also needs a wider cut.
"""
