"""The process group: find the place, join, stop together, leave."""
