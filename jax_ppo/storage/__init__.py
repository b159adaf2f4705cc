"""Access to files that are not on this machine: the Hugging Face hub."""
