import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@functools.cache
def load_example(file):
    """Return the module of a file in examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example():
    """Return a function from a name such as `losses/sapo` to the module."""
    return lambda name: load_example(EXAMPLES / f"{name}.py")


@pytest.fixture
def poison():
    """Return a function that puts NaN, inf and -inf in turn wherever the mask is 0."""

    def put(x, mask):
        garbage = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape)
        return np.where(mask.astype(bool), x, garbage).astype(np.float32)

    return put
