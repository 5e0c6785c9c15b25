"""The operator in a cluster: it passes the objects of the API server to plan(), and carries out the plan."""
