"""Scores of responses on the host: built-in rules and user-defined reward functions."""
