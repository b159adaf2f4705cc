"""The equations of PPO as pure functions on arrays. Nothing here knows of models, samplers or meshes."""
