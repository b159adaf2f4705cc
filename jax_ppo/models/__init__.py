"""The decoder, its heads, and Hugging Face checkpoints in and out. The only Flax in the project."""
