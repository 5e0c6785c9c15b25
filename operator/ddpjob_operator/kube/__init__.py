"""The cluster's shell around the plan: it tells the plan what the API server says, and does what the plan wants."""
