"""What the operator listens on: one bounded server for reports, health and metrics."""
