"""The supervised training that makes a small model of a run's own."""

import dataclasses
import types

import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.supervised import warmup


@pytest.mark.parametrize(("tokens", "vocab_size"), [(97, 112), (112, 112), (113, 128)])
def test_the_vocabulary_is_rounded_up_to_a_multiple_of_16(tokens, vocab_size):
    create = tiny.config().model.create
    architecture = warmup.make_architecture(create, tokens)
    assert architecture.vocab_size == vocab_size


class Stop(Exception):
    pass


@pytest.mark.parametrize(("steps", "warmup_steps"), [(10, 1), (400, 20)])
def test_a_twentieth_of_the_steps_warm_up(steps, warmup_steps, monkeypatch):
    def read_options(optim, grad_clip):
        raise Stop(dataclasses.asdict(optim))

    monkeypatch.setattr(warmup, "make_optimizer", read_options)
    nothing = types.SimpleNamespace()
    with pytest.raises(Stop) as stop:
        warmup.train_on_responses(
            nothing, {}, nothing, batch_size=1, steps=steps, lr=0.1, seed=0, mesh=None, report=print
        )
    [options] = stop.value.args
    assert (options["lr"], options["lr_warmup_steps"]) == (0.1, warmup_steps)


def test_a_mesh_that_cannot_split_the_model_is_refused(tmp_path):
    config = tiny.config()
    create = dataclasses.replace(config.model.create, intermediate_size=36)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, create=create))
    with pytest.raises(UserError, match="config.mesh.model=8: must divide .*MLP width .36."):
        warmup.make_model(config, tmp_path / "model", tiny.make_mesh(8, model=8), print)
