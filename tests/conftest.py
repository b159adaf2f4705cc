"""Eight virtual CPU devices for every test, so that meshes of 1, 2 and 8 can be compared in one process."""

import atexit
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Most of the suite's time is compilation. What runs for minutes wants its programs optimised: XLA_FLAGS= in the environment.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest

if jax.config.jax_num_cpu_devices != 8:  # not once more in a process that has its devices
    jax.config.update("jax_num_cpu_devices", 8)
# Tests, the workers that share them, and the runs that they start keep their compiled programs for each other, and leave the
# user's own alone. Workers inherit the folder from the process that starts them.
if "JAX_PPO_TEST_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jax_ppo_tests_")
    atexit.register(_cache.cleanup)
    os.environ["JAX_PPO_TEST_CACHE"] = _cache.name
os.environ["XDG_CACHE_HOME"] = os.environ["JAX_PPO_TEST_CACHE"]
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_PPO_TEST_CACHE"] + "/tests")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture
def cudnn_anywhere(monkeypatch):
    """The library's attention by cuDNN, which runs on NVIDIA alone, by its own XLA form; refused where a compiler would have to
    split it."""
    library = jax.nn.dot_product_attention

    def run(*arrays, implementation, **options):
        mesh = jax.sharding.get_abstract_mesh()
        assert implementation == "cudnn" and (
            mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names)
        )
        return library(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run)
