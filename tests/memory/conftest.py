import json

import pytest

import tiny
from jax_ppo.models.hf.config_export import to_hf_config


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a model folder that holds nothing but the config.json of `tiny.ARCHITECTURE`."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(to_hf_config(tiny.ARCHITECTURE)))
    return str(path)
