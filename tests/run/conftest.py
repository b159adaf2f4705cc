import pytest


@pytest.fixture
def no_weights(monkeypatch):
    """Fail where a run would load or make weights."""
    for name in ("training.state.StateBuilder.create", "run.supervised_loop.load_checkpoint"):
        monkeypatch.setattr(f"jax_ppo.{name}", lambda *_, **__: pytest.fail("weights were loaded"))
