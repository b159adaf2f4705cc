"""The algorithm: one PPO step from prompts to a new train state."""
