"""Ways in which devices share one computation, one per file, and what they exchange in each."""
