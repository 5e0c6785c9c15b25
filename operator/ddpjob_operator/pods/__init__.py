"""Objects that the operator creates: the Service and the pods, with their names and environment."""
