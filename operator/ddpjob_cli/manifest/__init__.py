"""DDPJobs as files: bounded YAML, errors with line and column, values from the command line."""
