"""Pods, nodes and reports, as the operator or the local run observes them, merged into facts."""
