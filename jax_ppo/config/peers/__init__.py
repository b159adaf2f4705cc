"""Options of other frameworks: a table each, from their names to what replaces them here."""
