"""What a plan counts of the layers' outputs that stay in memory until the backward pass."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.memory import step_plan
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.topologies import parse_topology

ROW = 512
ARCHITECTURE = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)


@pytest.fixture(scope="module")
def update_of(tmp_path_factory):
    """Return a function: options of the model -> the plan's phase of the actor's update."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(to_hf_config(ARCHITECTURE)))

    def plan(topology="h100:1", **options):
        options = {"model__gradient_checkpointing": True} | options
        config = tiny.config(
            model__path=str(path),
            model__dtype="bfloat16",
            packing__enabled=False,
            packing__row_length=ROW,
            actor__ppo_micro_batch_size_per_device=1,
            **options,
        )
        phases = step_plan.plan_step(config, parse_topology(topology), compiles=False).phases
        return next(phase for phase in phases if phase.name == "update_actor")

    return plan


def residual_bytes(policy):
    """Return the bytes that JAX keeps of a row for the backward pass."""
    net = Transformer(ARCHITECTURE, dtype=jnp.bfloat16, remat=True, remat_policy=policy)
    row = jnp.zeros((1, ROW), jnp.int32)
    params = {"params": jax.eval_shape(net.init, jax.random.key(0))}

    def residuals(params):
        return jax.vjp(lambda params: net.apply(params, row, row, row).hidden, params)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, params))
    return sum(x.size * x.dtype.itemsize for x in kept)


@pytest.mark.parametrize(
    "policy", ["attention", pytest.param("dots", marks=pytest.mark.exhaustive)]
)
def test_what_a_policy_keeps_is_what_jax_keeps(update_of, policy):
    full, kept = (
        update_of(model__attention="xla", model__gradient_checkpointing_policy=name)
        for name in ("full", policy)
    )
    difference = kept.memory.temporaries - full.memory.temporaries
    assert difference == residual_bytes(policy) - residual_bytes("full") > 0


def test_products_that_are_kept_are_not_computed_again(update_of):
    full, attention, dots = (
        update_of("v5e:1x1", model__gradient_checkpointing_policy=policy).work.flops
        for policy in ("full", "attention", "dots")
    )
    assert dots == pytest.approx(full * 3 / 4) and attention == full


def test_without_checkpoints_xla_keeps_the_scores_of_all_layers(update_of):
    options = {"topology": "v5e:1x1", "model__gradient_checkpointing": False}
    xla, splash = (
        update_of(**options, model__attention=name).memory.temporaries for name in ("xla", "splash")
    )
    # Scores in float32 and weights in bfloat16, of four heads and of four blocks of 128 queries
    # with 128, 256, 384 and 512 keys; and of the layer whose gradient is computed.
    kept = 2 * (4 + 2) * 4 * 128 * (128 + 256 + 384 + 512)
    current = 4 * 4 * 4 * 128 * 512
    assert xla - splash == kept + current
