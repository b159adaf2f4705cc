"""Gated DeltaNets beside attention: the sampler's states, sums of gradients, adapters.

That they compute transformers' numbers is the subject of test_families.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf_reference as reference
import tiny
from answering import Answering
from family_variants import SHARED_EXPERT
from jax_ppo.memory.step_flops import count_forward_flops
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.hf.weight_files import merge_adapters
from jax_ppo.models.layer_stack import MAX_UNROLLED_LAYERS
from jax_ppo.models.lora import Lora
from jax_ppo.models.quantization import quantize_kernels
from jax_ppo.models.recurrent_layers import convolve, last_inputs
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.networks import existing_targets
from jax_ppo.types import Prompts
from tiny_actor import HYBRID, Actor, make_prompts

ARCHITECTURE = dataclasses.replace(HYBRID, num_layers=3, linear_layers=(True, False, True))
LENGTHS = (5, 16, 1, 9, 2, 12, 7)


@pytest.fixture(scope="module")
def actor():
    return Actor(ARCHITECTURE)


def test_a_convolution_by_hand():
    """The token itself has the last weight; a segment does not see the one before it."""
    x = np.array([1.0, 2, 3, 4, 5], np.float32)[None, :, None]
    weights = np.array([[100.0], [10], [1]])
    sums = np.array([1, 12, 123, 4, 45])
    np.testing.assert_allclose(convolve(x, weights, np.array([[1, 1, 1, 2, 2]]))[0, :, 0], sums)
    np.testing.assert_array_equal(last_inputs(x, np.array([4]), 2)[0, :, 0], [3, 4])
    np.testing.assert_array_equal(last_inputs(x, np.array([1]), 2)[0, :, 0], [0, 1])


def assert_logprobs(actor, rollout, atol=2e-4):
    """The sampler's log-probs are those of passes over the whole texts."""
    is_drawn = rollout.action_mask
    assert is_drawn.sum() > 50
    expected = actor.logprobs(rollout)
    np.testing.assert_allclose(rollout.logprobs[is_drawn], expected[is_drawn], atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 4},  # slots are refilled
        # The last ones move into fewer.
        pytest.param({"slots": 16, "max_response_length": 70}, marks=pytest.mark.slow),
    ],
    ids=["refilled", "compacted"],
)
def test_a_token_changes_the_state_of_its_slot_once(actor, options):
    """Prompts have 1 to 16 tokens; two samples each."""
    prompts = make_prompts(LENGTHS)
    rollout = actor.sample(prompts, n=2, eos_ids=(3, 7, 11, 30, 41), **options)
    assert len(set(rollout.lengths.tolist())) > 3
    assert_logprobs(actor, rollout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("decoding", ["gpu", pytest.param("tpu", marks=pytest.mark.exhaustive)])
def test_an_accelerators_cache_keeps_the_rows_of_slots_that_no_longer_exist(decoding):
    actor = Actor(ARCHITECTURE)
    actor.decoded = actor.decoded.clone(decoding=decoding)
    prompts = make_prompts(LENGTHS)
    rollout = actor.sample(prompts, n=2, slots=16, max_response_length=70, eos_ids=(3, 7, 11))
    # Weights that differ by 1e-7 of themselves change one of these log-probs by 1.2e-3.
    assert_logprobs(actor, rollout, atol=2e-3)


@pytest.mark.slow
def test_a_turn_that_waits_does_not_change_its_state(actor):
    prompts = make_prompts(LENGTHS)
    rows = np.arange(len(LENGTHS), dtype=np.int32) * 3 + 1
    rollout = actor.sample(
        Prompts(prompts.tokens, prompts.lengths, rows),
        n=2,
        slots=3,
        max_response_length=24,
        eos_ids=(3, 7, 11, 30, 41, 42, 43, 50, 51),
        # Up to two tokens, after each of three turns.
        environment=Answering(lambda turn: [turn[0], turn[0] + 1][: turn[0] % 3], 2, last=4),
        max_turn_length=4,
    )
    assert (rollout.action_mask.sum(1) < rollout.lengths).any()  # there are observations
    assert_logprobs(actor, rollout)


def test_int8_leaves_rates_and_decays_as_they_are(actor):
    quantize = jax.jit(quantize_kernels, static_argnums=1)
    net = quantize(actor.params, jnp.bfloat16)["layer_0"]["delta_net"]
    assert net["in_proj_qkv"]["kernel"].dtype == net["out_proj"]["kernel"].dtype == jnp.int8
    kept = (net["in_proj_a"]["kernel"], net["in_proj_b"]["kernel"], net["log_rate"])
    assert all(x.dtype == jnp.bfloat16 for x in kept)


@pytest.mark.parametrize("pattern", [(True, False, True), (True, True, False) * 4])
@pytest.mark.parametrize(
    "remat",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.exhaustive)],
)
def test_the_gradient_reaches_every_layer(pattern, remat):
    """In a loop over periods too, whose layers have parts of three stacks."""
    assert len(pattern) == 3 or len(pattern) > MAX_UNROLLED_LAYERS
    architecture = dataclasses.replace(
        ARCHITECTURE, num_layers=len(pattern), linear_layers=pattern, num_heads=2, num_kv_heads=1
    )
    params = tiny.random_params(architecture, 0, 0, "lm")
    gradients = tiny.hidden_state_gradients(Transformer(architecture, remat=remat), params)
    for mixer, name in (("attention", "v_proj"), ("delta_net", "in_proj_qkv")):
        kernels = gradients["layers"][mixer][name]["kernel"]
        assert (np.abs(kernels).max((1, 2)) > 0).all()


def test_padding_whose_embedding_is_zero_leaves_every_gradient_finite():
    """Then queries and keys of padding are zero in each of 30 layers, and so is its gradient."""
    pattern = (True, True, False) * 10
    architecture = dataclasses.replace(ARCHITECTURE, num_layers=30, linear_layers=pattern)
    params = tiny.random_params(architecture, 0, 0, "lm")
    params["embed"]["embedding"][0] = 0
    ids = np.arange(20, dtype=np.int32).reshape(2, 10) % 7 + 1
    is_text = np.arange(10) >= np.array([[3], [0]])
    positions = np.maximum(np.cumsum(is_text, 1) - 1, 0)

    @jax.jit
    @jax.grad
    def run(params):
        inputs = np.where(is_text, ids, 0), positions, is_text.astype(np.int32)
        hidden = Transformer(architecture).apply({"params": params}, *inputs).hidden
        return jnp.where(is_text[..., None], jnp.sin(hidden), 0).sum()

    gradients = run(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert not gradients["embed"]["embedding"][0].any()
    assert gradients["embed"]["embedding"][1].any()


@pytest.mark.slow
def test_adapters_are_pefts(tmp_path):
    """Of every projection that the model has, but not of routed experts; merged, it is the same."""
    model = reference.save(tmp_path / "base", "qwen3_5_moe_text", **SHARED_EXPERT)
    architecture, params = reference.load(tmp_path / "base")
    lora = Lora(3, 6.0, existing_targets("all-linear", architecture))
    assert {"in_proj_a", "down_proj", "shared_expert_gate"} <= set(lora.targets)
    adapters, ours = reference.assert_adapters_are_pefts(
        tmp_path / "adapter", model, architecture, params, lora
    )
    merged = merge_adapters(params, adapters, architecture, lora)
    export_checkpoint(merged, architecture, tmp_path / "merged")
    merged = reference.load(tmp_path / "merged")[1]
    np.testing.assert_allclose(
        reference.our_logits(architecture, merged, reference.tokens()), ours, rtol=1e-3, atol=1e-3
    )


def test_layers_without_attention_cost_no_pairs_of_tokens():
    """Twice as long sequences need more than twice the FLOPs only where there is attention."""

    def surplus(linear_layers):
        architecture = dataclasses.replace(ARCHITECTURE, linear_layers=linear_layers)
        one, two = (count_forward_flops(architecture, np.array([n])) for n in (128, 256))
        return two - 2 * one

    assert surplus((True, False, True)) == pytest.approx(surplus((False,) * 3) / 3)
