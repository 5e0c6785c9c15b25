"""DDPJobs as files: YAML in bounds, errors with line and column, values from the command line."""
