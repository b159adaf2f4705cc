"""What a run reports: console lines, metric logs, training curves and the summary."""
