"""Scores of responses on the host: built-in rules and reward functions of the user's own."""
