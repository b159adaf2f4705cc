"""Reports of a run: console lines, metric logs, training curves and the summary."""
