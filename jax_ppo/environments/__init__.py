"""Environments that answer the policy's turns: protocols, execution on the host, two examples."""
