"""Metrics of jobs and of the operator: names, values, and the registry that serves them.

Pure: statuses and times come in, numbers go out. The operator brings the clock and the port
(kube/ports/exposition.py).
"""
