"""Metrics of jobs and of the operator: names, values, and the registry that serves them. Pure: the callers have the
clock, the port (kube/ports/exposition.py) and the file (local/run_files/metrics_file.py).
"""
