"""For every kind of layers: sampling on several devices, int8 kernels, meshes, and FLOPs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_reference as reference
import tiny
from family_variants import GEMMA_4
from jax_ppo.config.schema import MeshShape
from jax_ppo.errors import UserError
from jax_ppo.memory.step_flops import count_forward_flops
from jax_ppo.models import heads
from jax_ppo.models.deberta_encoder import Deberta, init_deberta_params
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.meshes import make_mesh, validate_architecture
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.networks import existing_targets
from jax_ppo.types import Prompts
from tiny_actor import ARCHITECTURE, HYBRID, Actor, make_prompts, sample_on_mesh

WIDE = reference.SIZES | GEMMA_4 | {"model_type": "gemma4_text"}
KINDS = {
    "gated": dataclasses.replace(ARCHITECTURE, vocab_size=64),
    "ungated": tiny.UNGATED,
    "experts": tiny.MIXTURE,
    # Biases of experts and routers, and attention sinks of query heads that two devices pad.
    "biased experts": dataclasses.replace(
        tiny.MIXTURE,
        family="gpt_oss",
        mlp_bias=True,
        swiglu_limit=1.0,
        attention_sinks=True,
        num_heads=3,
        num_kv_heads=1,
    ),
    "latent": tiny.LATENT,
    "recurrent": dataclasses.replace(
        HYBRID, vocab_size=64, num_layers=3, linear_layers=(True, False, True)
    ),
    "two widths": from_hf_config(WIDE | {"vocab_size": 64, "vocab_size_per_layer_input": 64}),
}
# Kernels that int8 leaves as they are.
EXACT = {"router", "in_proj_a", "in_proj_b"}


def make_actor(kind):
    """Return an actor whose biases, sinks and corrections of routers are random, too."""
    actor, rng = Actor(KINDS[kind]), np.random.default_rng(0)

    def draw(path, x):
        is_zero = path[-1].key in ("bias", "sinks", "correction_bias")
        return jnp.asarray(rng.normal(size=x.shape), jnp.float32) if is_zero else x

    actor.stacked = jax.tree_util.tree_map_with_path(draw, actor.stacked)
    return actor


def dequantize(params):
    """Return stacked parameters with the numbers that the int8 kernels stand for."""

    def rounded(path, x):
        names = [part.key for part in path]
        if names[0] != "layers" or names[-1] != "kernel" or EXACT & {*names}:
            return x
        scale = jnp.abs(x).max(-2, keepdims=True) / 127
        return jnp.round(x / scale) * scale

    return jax.tree_util.tree_map_with_path(rounded, params)


def sample(model, params, shape):
    """Return a rollout of the built-in engine on a mesh, from prompts of 1 to 16 tokens."""
    prompts = make_prompts((5, 16, 1, 9, 2, 12, 7, 3))
    prompts = Prompts(prompts.tokens % model.architecture.vocab_size, prompts.lengths)
    has_experts = model.architecture.num_experts > 0
    options = SamplingOptions(
        8, 1.0, n=2, eos_ids=(3,), slots=4, returns_routed_experts=has_experts
    )
    mesh = tiny.make_mesh(int(np.prod([*shape.values()])), **{"data": 1, "fsdp": 1} | shape)
    return sample_on_mesh(mesh, model, params, prompts, options)


def assert_scored_alike(actor, rollout):
    """Require the log-probs of passes over whole texts."""
    drawn = rollout.action_mask
    assert drawn.sum() > 30
    np.testing.assert_allclose(rollout.logprobs[drawn], actor.logprobs(rollout)[drawn], atol=2e-4)


EIGHT = {"data": 2, "fsdp": 2, "model": 2}
WITH_EXPERTS = {"fsdp": 2, "expert": 2, "model": 2}
# More devices than key-value heads.
SHARED_HEADS = {"fsdp": 2, "model": 4}


@pytest.mark.parametrize(
    ("kind", "quantized", "shape"),
    [
        pytest.param(*case, marks=getattr(pytest.mark, suite))
        for suite, *case in (
            ("slow", "gated", True, {"data": 1}),
            ("exhaustive", "gated", True, EIGHT),
            ("exhaustive", "gated", True, SHARED_HEADS),
            ("exhaustive", "ungated", True, SHARED_HEADS),
            ("exhaustive", "experts", False, WITH_EXPERTS),
            ("slow", "experts", True, WITH_EXPERTS),
            ("exhaustive", "biased experts", False, WITH_EXPERTS),
            ("slow", "latent", True, {"data": 1}),
            ("slow", "latent", False, {"data": 2, "model": 2}),
            ("slow", "latent", False, {"expert": 2}),
            ("exhaustive", "latent", True, {"data": 2, "model": 2}),
            ("exhaustive", "latent", True, {"expert": 2}),
            ("exhaustive", "recurrent", False, EIGHT),
            ("exhaustive", "recurrent", True, EIGHT),
            ("slow", "two widths", False, {"data": 2, "model": 2}),
        )
    ],
)
def test_an_engine_samples_the_same_on_several_devices_and_as_from_whole_texts(
    kind, quantized, shape
):
    """Kernels in int8 count as the numbers that they stand for."""
    actor = make_actor(kind)
    params = actor.stacked
    rollout = sample(actor.scored.clone(quantized=quantized), params, shape)
    if quantized:
        actor.stacked = dequantize(params)
        assert np.abs(make_actor(kind).logprobs(rollout) - rollout.logprobs).max() > 1e-3
    expected = sample(actor.scored, actor.stacked, {"data": 1})
    assert_scored_alike(actor, expected)
    np.testing.assert_array_equal(rollout.responses, expected.responses)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_array_equal(rollout.routed_experts, expected.routed_experts)


@pytest.mark.slow
def test_adapters_of_latent_attention_are_sampled_with():
    actor = make_actor("latent")
    lora = Lora(3, 6.0, existing_targets("all-linear", tiny.LATENT))
    shapes = jax.eval_shape(lambda: init_adapters(tiny.LATENT, lora, jax.random.key(0), "lm"))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, shapes)
    actor.scored = actor.scored.clone(lora=lora)
    actor.stacked = join_params(actor.stacked, adapters)
    assert_scored_alike(actor, sample(actor.scored, actor.stacked, {"data": 1}))


@pytest.mark.parametrize(
    ("kind", "axis", "changes", "message"),
    [
        ("biased experts", "context", {}, "must be 1, .* attention sinks"),
        ("experts", "expert", {"num_experts": 3}, r"must divide .*number of experts \(3\)"),
        ("latent", "stage", {}, "must be 1, .* have no experts"),
        ("latent", "fsdp", {"latent_size": 15}, r"must divide .*width of the latents \(15\)"),
        ("recurrent", "context", {}, "must be 1, .* recurrent"),
        ("recurrent", "stage", {}, "must be 1, .* recurrent"),
        ("recurrent", "model", {"delta_key_heads": 1}, r"must divide .*key heads of .* \(1\)"),
        ("two widths", "stage", {}, "must be 1, .* have wider heads"),
        ("two widths", "fsdp", {"num_layers": 5, "per_layer_size": 3, "shared_layers": 0}
            | {"local_layers": (True,) * 5}, r"width of the embeddings of layers \(15\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(kind, axis, changes, message):
    mesh = make_mesh(MeshShape(**{"data": 1, "fsdp": 1} | {axis: 2}), jax.devices()[:2])
    with pytest.raises(UserError, match=rf"^config\.mesh\.{axis}=2: .*{message}"):
        validate_architecture(mesh, dataclasses.replace(KINDS[kind], **changes))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("experts", ("context", "model", "fsdp", "expert", "stage")),
        ("latent", ("context", "model", "fsdp", "expert")),
        ("recurrent", ("model", "fsdp")),
        ("two widths", ("context", "model", "fsdp")),
    ],
)
def test_what_can_be_split_is_accepted(kind, axes):
    for axis in axes:
        mesh = make_mesh(MeshShape(**{"data": 1, "fsdp": 1} | {axis: 2}), jax.devices()[:2])
        validate_architecture(mesh, KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        # Layers, heads, and the widths of a head's keys and values: a token alone sees one key.
        ("gated", 2 * 4 * (8 + 8)),
        ("ungated", 1 * 4 * (4 + 4)),
        ("experts", 2 * 4 * (4 + 4)),
        ("latent", 2 * 4 * (12 + 6)),
        # The states of two layers are read twice and changed.
        ("recurrent", 1 * 4 * (8 + 8) + 2 * 3 * 4 * 6 * 4),
        ("two widths", 3 * 4 * (8 + 8) + 3 * 4 * (16 + 16)),
        ("deberta", 3 * 4 * (8 + 8)),
    ],
)
def test_each_weight_of_a_matrix_is_read_once_per_token(kind, others):
    """Of the experts, those of a token count; further products are `others`."""
    if kind == "deberta":
        architecture = DebertaArchitecture("deberta-v2", 97, 32, 48, 3, 4, 1e-7, 64, 8, 0)
        init = functools.partial(init_deberta_params, Deberta(architecture))
        params = jax.eval_shape(init, jax.random.key(0))
    else:
        architecture = KINDS[kind]
        params = heads.param_shapes(Transformer(architecture), "lm")
    products = others
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "layer" in name and "kernel" in name:
            is_used = "experts" not in name
            share = 1 if is_used else architecture.experts_per_token / architecture.num_experts
            products += share * x.size
    assert count_forward_flops(architecture, np.array([1, 1, 1])) == 3 * 2 * products
