"""Prompts in, responses out: prefill, the decode loop with its cache, the draw of each token. Knows nothing of PPO."""
