"""From a file, the hub or a generator to tokenised prompts. Host only: NumPy and text, no arrays of the mesh."""
