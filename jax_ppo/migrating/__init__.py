"""Options of other frameworks as tables, and the command that translates them."""
