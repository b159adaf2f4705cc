"""Translate commands of other frameworks, using the tables in `config/peers/`."""
