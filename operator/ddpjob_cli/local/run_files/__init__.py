"""Files of a local run: its folder, records, history, report and metrics. This package starts no processes."""
