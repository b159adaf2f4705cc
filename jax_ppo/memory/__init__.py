"""How much memory and time a step needs: estimates, the compiler's figures, what to change."""
