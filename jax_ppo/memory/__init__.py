"""How much memory and time a step needs: formulas, the compiler's figures, what to change."""
