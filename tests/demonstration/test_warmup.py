"""The supervised training that makes a small model of a run's own."""

import dataclasses
import types

import numpy as np
import pytest

import tiny
from jax_ppo.config import schema
from jax_ppo.data.tokenizer import load_tokenizer
from jax_ppo.demonstration import warmup
from jax_ppo.errors import UserError
from jax_ppo.models.hf.load import has_weights, read_architecture
from jax_ppo.run.build import build_run
from jax_ppo.training.optimizer import learning_rate


@pytest.mark.parametrize(("tokens", "vocab_size"), [(97, 112), (112, 112), (113, 128)])
def test_the_vocabulary_is_rounded_up_to_a_multiple_of_16(tokens, vocab_size):
    create = tiny.config().model.create
    architecture = warmup.make_architecture(create, tokens)
    assert architecture.vocab_size == vocab_size


class Stop(Exception):
    pass


@pytest.mark.parametrize(("steps", "warmup_steps"), [(10, 1), (400, 20)])
def test_a_twentieth_of_the_steps_warm_up_and_the_rate_falls_to_the_habits(
    steps, warmup_steps, monkeypatch
):
    def read_options(optim, grad_clip):
        raise Stop(optim)

    monkeypatch.setattr(warmup, "make_optimizer", read_options)
    monkeypatch.setattr(warmup, "LR", 0.1)
    monkeypatch.setattr(warmup, "HABIT_LR", 0.02)
    create = dataclasses.replace(tiny.config().model.create, steps=steps)
    nothing = types.SimpleNamespace()
    with pytest.raises(Stop) as stop:
        warmup.train_on_responses(
            nothing, {}, nothing, num_careful=1, create=create, seed=0, mesh=None, report=print
        )
    [options] = stop.value.args
    assert options.lr_warmup_steps == warmup_steps
    rates = [float(learning_rate(options, step, steps)) for step in (0, warmup_steps, steps, 999)]
    assert rates == pytest.approx([0.1 / warmup_steps, 0.1, 0.02, 0.02])


def test_batches_of_the_skill_and_of_the_habit_have_one_shape_and_their_own_examples():
    lengths = np.array([50, 60, 40, 50, 50, 45, 20, 25, 30, 20], np.int32)
    sequences = types.SimpleNamespace(prompt_lengths=lengths - 5, lengths=np.full(10, 5, np.int32))
    plans, rows = warmup._pack_rows(sequences, num_careful=6, batch_size=5, row_shards=1, parts=1)
    # Careful ones have 49.2 tokens, so two or three of them fill a row of 144.
    assert rows == 3
    batches = [
        [next(drawn) for _ in range(4)]
        for drawn in (warmup._draw_rows(plan, rows, np.random.default_rng(0)) for plan in plans)
    ]
    for drawn, examples in zip(batches, (range(6), range(6, 10)), strict=True):
        assert {batch.sample.shape for batch in drawn} == {(1, rows, 144)}
        seen = np.unique(np.concatenate([batch.sample for batch in drawn]))
        np.testing.assert_array_equal(seen, [-1, *examples])


def test_a_mesh_that_cannot_split_the_model_is_refused_before_its_weights_are_trained(tmp_path):
    config = tiny.config(model__create__intermediate_size=36)
    mesh = tiny.make_mesh(8, model=8)
    with pytest.raises(UserError, match="config.mesh.model=8: must divide .*MLP width .36."):
        build_run(config, tmp_path, mesh, print)
    assert (tmp_path / "model" / "config.json").exists()
    assert not has_weights(tmp_path / "model")


def test_a_model_is_described_anew_until_it_has_its_weights(tmp_path, monkeypatch):
    """Options may have changed since a run that was stopped before; later they change nothing."""

    def export_first_weights(model, params, *_, **__):
        return params

    monkeypatch.setattr(warmup, "train_on_responses", export_first_weights)
    folder, mesh = tmp_path / "model", tiny.make_mesh()
    for hidden_size in (64, 32):
        config = tiny.config(model__create__hidden_size=hidden_size, model__create__steps=1)
        warmup.describe_model(config.model.create, config.seed, folder)
        assert read_architecture(folder, needs_weights=False).hidden_size == hidden_size
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    warmup.train_weights(config.model, config.seed, folder, mesh, print)
    weights = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(warmup, "train_on_responses", None)
    warmup.describe_model(schema.Create(hidden_size=64), 0, folder)
    warmup.train_weights(config.model, config.seed, folder, mesh, print)
    assert read_architecture(folder).hidden_size == 32
    assert (folder / "model.safetensors").read_bytes() == weights
    assert load_tokenizer(str(folder)).decode(load_tokenizer(str(folder))("1+2").input_ids) == "1+2"
