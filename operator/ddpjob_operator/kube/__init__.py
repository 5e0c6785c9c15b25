"""The operator in a cluster: it hands the plan what the API server shows, and carries out what the plan decides."""
