"""Environments that answer the policy's turns: their protocols, the host's side, two examples."""
