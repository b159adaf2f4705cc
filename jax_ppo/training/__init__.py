"""The train state, its optimizer, packed rows, and checkpoints."""
