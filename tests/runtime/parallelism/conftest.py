import jax
import pytest


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Compute float32 products exactly; accelerators would round the factors."""
    with jax.default_matmul_precision("highest"):
        yield
