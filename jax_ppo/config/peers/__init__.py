"""Options of other frameworks: one table each, from their names to their counterparts here."""
