"""transformers' `generate` with our draws samples what the built-in engine samples."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny_actor
from jax_ppo.config.schema import MeshShape, RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.models.hf import save
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.engine import SamplingOptions, running
from jax_ppo.sampler.engines import external
from jax_ppo.sampler.engines.hugging_face import HuggingFaceEngine
from jax_ppo.sampler.other_mesh import engine_on_shapes
from jax_ppo.sampler.text_search import search_for

pytest.importorskip("torch")
MESH = meshes.make_mesh(MeshShape(), jax.devices()[:1])
# Token i is the letter i of the alphabet, so that a stop string may span tokens.
LETTERS = [bytes([97 + i % 26]) for i in range(tiny_actor.ARCHITECTURE.vocab_size)]
STOP = search_for(["ab", "e"], LETTERS, len(LETTERS))
OPTIONS = {
    "plain": {"temperature": 0.8},
    "ends": {"temperature": 1.0, "eos_ids": (1, 2, 3, 4, 5), "min_new_tokens": 2, "stop": STOP},
    "filtered": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "few slots": {"temperature": 1.0, "slots": 2},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def folder(actor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor") / "model"
    save.export_checkpoint(actor.stacked, tiny_actor.ARCHITECTURE, folder)
    return folder


def make_engine(actor, folder, **changes):
    options = RolloutOptions(engine="transformers", **changes)
    return HuggingFaceEngine(MESH, actor.scored, actor.stacked, options, folder, 32)


def generate(engine, params, prompts, options, first=None):
    with jax.set_mesh(MESH), running(engine):
        engine.update_weights(params)
        rollout = engine.generate(prompts, jax.random.key(7), options, first)
        engine.release_weights()
        return jax.tree.map(np.asarray, rollout)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.exhaustive if name in ("plain", "greedy") else pytest.mark.slow
        )
        for name in OPTIONS
    ],
)
def test_it_draws_the_tokens_of_the_built_in_engine(actor, folder, prompts, name):
    options = SamplingOptions(max_response_length=10, n=2, **OPTIONS[name])
    ours, expected = (
        generate(engine, actor.stacked, prompts, options, first=5)
        for engine in (
            make_engine(actor, folder),
            BuiltInEngine(MESH, actor.scored, actor.stacked),
        )
    )
    for field in ("responses", "lengths", "truncated", "action_mask", "prompts"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ours, field), getattr(expected, field))
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=2e-4)
    assert len(set(ours.lengths.tolist())) > 1 or name != "ends"


@pytest.mark.slow
def test_it_draws_no_ids_without_text(actor, folder, prompts):
    few = actor.scored.clone(architecture=dataclasses.replace(tiny_actor.ARCHITECTURE, num_ids=9))
    engine = HuggingFaceEngine(MESH, few, actor.stacked, RolloutOptions(), folder, 32)
    rollout = generate(engine, actor.stacked, prompts, SamplingOptions(10, 1.0, n=2))
    assert np.max(rollout.responses) == 8


def test_log_probs_that_leave_the_temperature_out_are_refused(actor, folder, monkeypatch):
    """They differ by less than other weights' log-probs at a temperature near 1."""
    engine = make_engine(actor, folder, temperature=0.9)
    sample = engine.sample

    def report_undivided(prompts, keys, options):
        (response,) = sample(prompts, keys, options)
        tokens = np.array([[*prompts[0], *response.tokens]], np.int32)
        logprobs = external._token_logprobs(actor.scored, actor.stacked, tokens, (1.0,))
        logprobs = np.asarray(logprobs)[0, 0, len(prompts[0]) - 1 :]
        return [dataclasses.replace(response, logprobs=logprobs)]

    with jax.set_mesh(MESH), running(engine):
        engine.update_weights(actor.stacked)
        monkeypatch.setattr(engine, "sample", report_undivided)
        with pytest.raises(UserError, match=r"does not divide logits by .*temperature=0\.9"):
            engine.update_weights(actor.stacked)


@pytest.mark.slow
def test_adapters_are_merged(actor, folder, prompts):
    lora = Lora(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
    adapters = init_adapters(tiny_actor.ARCHITECTURE, lora, jax.random.key(1), "lm")
    params = join_params(actor.stacked, jax.tree.map(lambda x: x + 0.1, adapters))
    adapted = Transformer(tiny_actor.ARCHITECTURE, lora=lora)
    ours, expected = (
        generate(engine, params, prompts, SamplingOptions(6, 1.0))
        for engine in (
            HuggingFaceEngine(MESH, adapted, params, RolloutOptions(), folder, 32),
            BuiltInEngine(MESH, adapted, params),
        )
    )
    np.testing.assert_array_equal(ours.responses, expected.responses)
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=2e-4)


def test_its_shapes_are_known_ahead(actor, folder, prompts):
    options = SamplingOptions(max_response_length=3, temperature=1.0, n=2)
    engine = make_engine(actor, folder)
    ahead = engine_on_shapes(engine, MESH).generate(prompts, jax.random.key(0), options)
    with jax.set_mesh(MESH), running(engine):
        engine.update_weights(actor.stacked)
        rollout = engine.generate(prompts, jax.random.key(7), options)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), r) for r in (rollout, ahead)]
    assert shapes[0] == shapes[1]


def test_other_weights_are_noticed(actor, folder, monkeypatch):
    engine = make_engine(actor, folder)
    with jax.set_mesh(MESH), running(engine):
        engine.update_weights(actor.stacked)
        monkeypatch.setattr(engine, "load_weights", lambda: None)
        with pytest.raises(UserError, match=r"after update 2 its log-probs differ.*other weights"):
            engine.update_weights(jax.tree.map(lambda x: -x, actor.stacked))


def test_weights_are_removed(actor, folder, tmp_path):
    engine = make_engine(actor, folder, weights_dir=str(tmp_path / "weights"))
    with jax.set_mesh(MESH), running(engine):
        engine.update_weights(actor.stacked)
        assert engine.weights.is_relative_to(tmp_path) and (engine.weights / "config.json").exists()
    assert not list((tmp_path / "weights").iterdir())
