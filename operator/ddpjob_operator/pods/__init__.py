"""What the operator creates: the Service, the pods, their names and their environment."""
