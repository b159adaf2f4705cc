"""The equations of PPO as pure functions on arrays, without models, samplers or meshes."""
