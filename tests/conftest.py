"""Set up JAX for the tests: eight virtual CPU devices, and compiled programs kept on disk."""

import atexit
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Eight devices, so that meshes of 1, 2 and 8 can be compared in one process.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# No stack of callers, here pytest's, for each operation: 3 % of the CPU time of tests that compile.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import numpy as np
import pytest

import quick_compilation
import recorded
import waiting

_dropped_flags: list[str] = []
quick_compilation.set_flags(_dropped_flags.append)
quick_compilation.share_contexts()
# Tracing makes millions of small objects, few of them garbage: rarer collections save 5 % of the
# CPU time.
gc.set_threshold(100_000, 50, 100)
# A shell ignores SIGINT for what it runs in the background, and the runs that tests start and
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Not set again in a process that has initialized its devices (edited_copies.py).
if jax.config.jax_num_cpu_devices != 8:
    jax.config.update("jax_num_cpu_devices", 8)
# All processes of a test session (workers and the runs that tests start) share one folder of
# compiled programs, apart from the user's own. Workers inherit it from the process that starts
# them.
if "JAX_PPO_TEST_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jax_ppo_tests_")
    atexit.register(_cache.cleanup)
    os.environ["JAX_PPO_TEST_CACHE"] = _cache.name
os.environ["XDG_CACHE_HOME"] = os.environ["JAX_PPO_TEST_CACHE"]
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_PPO_TEST_CACHE"] + "/tests")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# Linux allows a process 65,530 memory maps (vm.max_map_count), and every program that XLA compiles
# for the CPU takes some: 50 on average in the tests of the update, for eight devices and without
# optimization. At the limit LLVM cannot allocate memory, and the process is killed by SIGSEGV.
# A module adds at most 30,000, so that clearing at this bound keeps every worker below the limit.
# A training run compiles about two hundred programs once and stays below 5,000 maps (measured:
# 4,043 with eight devices, 182 programs), so that the package itself needs no such care.
MOST_MAPS = 32_000


# The first tests to run after an edit: each layer of the package once, without a whole run.
SMOKE = (
    "config/test_loading.py",
    "config/test_validation.py",
    "data/test_tokenize_prompts.py",
    "kernels/test_action_mask.py",
    "kernels/test_advantages.py",
    "ppo/test_reward_shaping.py",
    "ppo/test_update.py::test_first_mini_batch_has_ratio_one_and_kl_zero[0.6]",
    "rewards/test_number_rules.py",
    "sampler/test_generate.py::test_the_contract",
    "test_architecture.py",
    "training/test_packing.py",
)


def pytest_report_header() -> list[str]:
    """Name the flags of XLA that the tests do without."""
    return _dropped_flags


def require_smoke_tests_exist() -> None:
    """Raise `pytest.UsageError` for an entry of `SMOKE` whose file or function does not exist."""
    for entry in SMOKE:
        path, _, test = entry.partition("::")
        file = Path(__file__).parent / path
        definition = f"def {test.partition('[')[0]}" if test else ""
        if not file.exists() or definition not in file.read_text():
            raise pytest.UsageError(f"SMOKE in tests/conftest.py: there is no test {entry!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that compute the values of tests/expected/ again (recorded.py)."""
    parser.addoption(
        "--parity",
        action="store_const",
        const="check",
        help="compare with torch, transformers and peft themselves, and what is stored of them",
    )
    parser.addoption(
        "--store-expected",
        dest="parity",
        action="store_const",
        const="write",
        help="store what they compute (tests/harness/regenerate_expected.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell `recorded` what is asked for."""
    recorded.mode = config.getoption("parity")


def pytest_sessionfinish() -> None:
    """Store the expected values that were computed for that."""
    if recorded.mode == "write":
        recorded.write_files()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the smoke tests, and leave out those that need `--parity`."""
    if recorded.mode is None:
        live = [item for item in items if item.get_closest_marker("parity")]
        config.hook.pytest_deselected(items=live)
        items[:] = [item for item in items if item not in set(live)]
    require_smoke_tests_exist()
    prefixes = tuple(f"tests/{name}" for name in SMOKE)
    for item in items:
        if item.nodeid.startswith(prefixes) and not item.get_closest_marker("slow"):
            item.add_marker("smoke")


@pytest.fixture(scope="module", autouse=True)
def bounded_memory_maps() -> Iterator[None]:
    """Drop compiled programs between modules once the process has many memory maps.

    Programs that took longer than 0.3 s to compile are read from the disk when needed again.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def coordinator_address() -> Iterator[str]:
    """Yield an address, for the coordination service of a run, that nothing else can take."""
    with waiting.keep_port() as kept:
        yield f"localhost:{kept.getsockname()[1]}"


@pytest.fixture
def cudnn_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace cuDNN attention, which runs on NVIDIA GPUs only, by XLA's.

    The replacement fails where a compiler would have to split the call over a mesh.
    """
    library: Callable = jax.nn.dot_product_attention

    def run(*arrays, implementation: str, **options) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        assert implementation == "cudnn" and (
            mesh.empty or set(mesh.manual_axes) == set(mesh.axis_names)
        )
        return library(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", run)


@pytest.fixture
def poison() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that puts NaN, inf and -inf in turn wherever the mask is 0."""

    def put(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        garbage = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape)
        return np.where(mask.astype(bool), x, garbage).astype(np.float32)

    return put
