"""Where tests find real data: the folder that `JAX_PPO_DATA` names."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DATA = pathlib.Path(os.environ.get("JAX_PPO_DATA", ROOT.parent / "shared" / "data"))


def needs(folder: str) -> pytest.MarkDecorator:
    """Mark a test that reads a folder of it."""
    reason = f"no {DATA / folder} (JAX_PPO_DATA names another place)"
    return pytest.mark.skipif(not (DATA / folder).exists(), reason=reason)
