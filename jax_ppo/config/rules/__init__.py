"""Rules that relate options to each other, by the part of a run that they concern."""
