import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def poison():
    """Return a function that puts NaN, inf and -inf in turn wherever the mask is 0."""

    def put(x, mask):
        garbage = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape)
        return np.where(mask.astype(bool), x, garbage).astype(np.float32)

    return put
