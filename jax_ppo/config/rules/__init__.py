"""Rules that relate options to each other, grouped by the part of a run that they concern."""
