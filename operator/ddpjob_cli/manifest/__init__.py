"""DDPJobs as files: YAML of limited size, errors with line and column, values from the command line."""
