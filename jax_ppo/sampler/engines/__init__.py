"""Rollout engines outside of JAX, which `registries.ROLLOUT_ENGINES` lists."""
