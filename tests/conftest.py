"""Eight virtual CPU devices for every test, so that meshes of 1, 2 and 8 can be compared in one process."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
