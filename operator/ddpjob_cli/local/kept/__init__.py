"""What a local run leaves on the disk: its folder, records, history, report and metrics. It starts nothing."""
