"""Observations: pods, nodes and reports as each shell sees them, merged into facts."""
