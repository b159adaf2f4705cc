"""Scores of responses: rules on the host, by data source or of one's own."""
