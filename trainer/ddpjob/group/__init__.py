"""The process group: join it, stop together, and leave it."""
