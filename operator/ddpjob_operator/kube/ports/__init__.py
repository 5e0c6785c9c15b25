"""HTTP servers of the operator, for reports, health and metrics. All of them limit connections, bytes and time."""
