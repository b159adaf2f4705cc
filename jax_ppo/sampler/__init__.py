"""Prompts in, responses out: the rollout engine, its decode loop and the draw of each token."""
