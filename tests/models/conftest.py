import os
from pathlib import Path

import jax
import pytest


@pytest.fixture(autouse=True)
def exact_matmuls():
    """Compute float32 products exactly; accelerators would round the factors."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def tinystories() -> Path:
    """Return the folder of a real pretrained model."""
    root = os.environ.get("JAX_PPO_DATA", str(Path(__file__).parents[3] / "shared/data"))
    folder = Path(root) / "tinystories-260k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing; JAX_PPO_DATA names the folder of the test data")
    return folder
