"""Learning rates, and what is stored in bfloat16; AdamW is in tests/ppo/test_update.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.config.training_options import Actor, Optim
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.runtime import sharding
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.networks import Folders
from jax_ppo.training.optimizer import (
    add_gradients,
    descend,
    learning_rate,
    make_optimizer,
    round_stochastically,
    rounding_keys,
    zero_gradients,
)
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import StateBuilder, trained_trees
from tiny_update import ALL, run_update

KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("schedule", "half_way", "end"),
    # After two steps of warm-up, from 2 to a quarter of it: the cosine is half way between them in
    # the middle, as the line is.
    [("constant", 2.0, 2.0), ("linear", 1.25, 0.5), ("cosine", 1.25, 0.5)],
)
def test_a_schedule_ends_at_its_floor_and_stays_there(schedule, half_way, end):
    options = Optim(lr=2.0, lr_warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.25)
    rates = [float(learning_rate(options, jnp.int32(step), 10)) for step in (0, 1, 2, 6, 10, 1000)]
    np.testing.assert_allclose(rates, [1.0, 2.0, 2.0, half_way, end, end], rtol=1e-6)


def test_weight_decay_leaves_norms_alone():
    params = {"norm": {"scale": jnp.ones(3)}, "embed": {"embedding": jnp.ones((2, 3))}}
    transform = make_optimizer(Actor(optim=Optim(weight_decay=0.1)))
    moved_params, _, _, _ = descend(
        transform, params, transform.init(params), jax.tree.map(jnp.zeros_like, params), 1.0
    )
    np.testing.assert_array_equal(moved_params["norm"]["scale"], 1.0)
    np.testing.assert_allclose(moved_params["embed"]["embedding"], 0.9, rtol=1e-6)


@functools.partial(jax.jit, static_argnames="keys")
def _round_with_keys(x, keys):
    return jax.vmap(round_stochastically, (None, 0))(x, jax.random.split(KEY, keys))


def round_with_keys(x, keys):
    return np.asarray(_round_with_keys(x, keys), np.float64)


def test_the_mean_over_keys_is_the_value():
    x = jax.random.normal(jax.random.key(0), (64,)) * 10.0 ** jnp.arange(-32, 32).clip(-30, 30)
    rounded = round_with_keys(x, keys=4096)
    # Two neighbours are at most 2^-7 of the value apart; a coin deviates by half of that, and the
    # mean of 4,096 coins by 1/64 of it.
    np.testing.assert_allclose(rounded.mean(0) / np.asarray(x, np.float64), 1, atol=5 * 2**-14)
    assert np.all([len(np.unique(column)) == 2 for column in rounded.T])
    np.testing.assert_allclose(rounded, np.broadcast_to(x, rounded.shape), rtol=2**-7)


def test_positions_round_independently():
    """Neighbours, rows and layers alike: their ups and downs are not correlated."""
    x = jnp.full((4, 64, 64), 1 + 2.0**-8)  # half-way
    ups = round_with_keys(x, keys=4) > 1
    shifts = [(1, 1), (2, 1), (3, 1), (0, 1)]  # of layer, row, column and key
    agreements = [np.mean(ups == np.roll(ups, shift, axis)) for axis, shift in shifts]
    # 65,536 coins: a standard deviation is 1/512.
    np.testing.assert_allclose([ups.mean(), *agreements], 0.5, atol=5 / 512)


def test_exact_values_infinities_and_nan_are_kept():
    x = jnp.array([0.0, -0.0, 1.0, -1.5, 2.0**100, jnp.inf, -jnp.inf, jnp.nan])
    rounded = round_with_keys(x, keys=16)
    np.testing.assert_array_equal(rounded, np.broadcast_to(x, rounded.shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def take_steps(options, steps, params, gradients, rate):
    transform = make_optimizer(Actor(optim=options, grad_clip=1e6))

    def step(_, carry):
        params, state = carry
        key, _ = rounding_keys(5, Stream.ACTOR_ROUNDING, state)
        params, state, *_ = descend(transform, params, state, gradients, rate, key=key)
        return params, state

    return jax.lax.fori_loop(0, steps, step, (params, transform.init(params)))


def test_updates_below_half_of_the_spacing_add_up():
    options = Optim(param_dtype="bfloat16", weight_decay=0.0)
    params = {"embed": {"embedding": jnp.full((64, 64), 1.5, jnp.bfloat16)}}
    gradients = jax.tree.map(lambda x: jnp.ones_like(x, dtype=jnp.float32), params)
    rate = 2.0**-12  # the spacing at 1.5 is 2^-7: to nearest, nothing would move
    moved, _ = take_steps(options, 256, params, gradients, rate)
    embedding = moved["embed"]["embedding"]
    assert embedding.dtype == jnp.bfloat16
    # Adam's update of a constant gradient is 1 per step.
    expected = 1.5 - 256 * rate
    assert float(jnp.mean(embedding, dtype=jnp.float32)) == pytest.approx(expected, abs=2e-3)


def test_moments_in_bfloat16_follow_those_in_float32():
    gradients = {"norm": {"scale": jax.random.normal(jax.random.key(1), (2048,))}}
    params = jax.tree.map(jnp.zeros_like, gradients)
    # 1 - beta2 is below half of the spacing: to nearest, the second moment would stop at a third.
    wide, low = (
        take_steps(Optim(moments_dtype=dtype), 1000, params, gradients, 0.0)[1]
        for dtype in ("float32", "bfloat16")
    )
    for one, other in zip(jax.tree.leaves(wide), jax.tree.leaves(low), strict=True):
        if not one.ndim:
            assert one.dtype == other.dtype == jnp.int32
            continue
        assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)
        ratio = jnp.mean(other.astype(jnp.float32) / one)
        assert float(ratio) == pytest.approx(1, abs=5e-3)


def test_a_sum_of_gradients_in_bfloat16_keeps_small_shares():
    params = {"norm": {"scale": jnp.zeros(4096, jnp.bfloat16)}}
    add = jax.jit(add_gradients)
    total = add(zero_gradients(params, "bfloat16"), {"norm": {"scale": jnp.ones(4096)}}, KEY)
    small = {"norm": {"scale": jnp.full(4096, 2.0**-10)}}
    for i in range(64):
        total = add(total, small, jax.random.fold_in(KEY, i))
    assert total["norm"]["scale"].dtype == jnp.bfloat16
    mean = float(jnp.mean(total["norm"]["scale"], dtype=jnp.float32))
    assert mean == pytest.approx(1 + 64 * 2.0**-10, abs=2e-3)
    # In float32 by default, also for bfloat16 parameters.
    assert zero_gradients(params, "float32")["norm"]["scale"].dtype == jnp.float32


def test_noise_depends_on_seed_role_and_step_alone():
    def noise(seed=0, stream=Stream.ACTOR_ROUNDING, count=0):
        state = make_optimizer(Actor()).init({"norm": {"scale": jnp.zeros(1)}})
        state = jax.tree.map(lambda x: x + count if x.dtype == jnp.int32 else x, state)
        return [
            tuple(jax.random.key_data(key).tolist()) for key in rounding_keys(seed, stream, state)
        ]

    assert noise() == noise()
    others = [noise(), noise(seed=1), noise(stream=Stream.CRITIC_ROUNDING), noise(count=1)]
    assert len({key for keys in others for key in keys}) == 8


def test_a_step_is_the_same_on_any_mesh():
    options = Optim(lr=1e-2, param_dtype="bfloat16", moments_dtype="bfloat16")
    r = np.random.default_rng(0)
    layers = {"attention": {"q_proj": {"kernel": r.normal(size=(2, 16, 16))}}}
    params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16), {"layers": layers, "norm": {"scale": np.ones(16)}}
    )
    gradients = jax.tree.map(lambda x: r.normal(size=x.shape).astype(np.float32), params)

    def run(mesh):
        with jax.set_mesh(mesh):
            layout = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
            return take_steps(
                options, 3, *jax.device_put((params, gradients), (layout, layout)), 1e-3
            )

    one = run(tiny.make_mesh())
    many = run(tiny.make_mesh(8, data=2, fsdp=2, model=2))
    kernel = many[0]["layers"]["attention"]["q_proj"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, one, many)


@pytest.mark.slow
def test_an_update_keeps_the_types_in_half_the_memory():
    options = {f"actor__optim__{name}_dtype": "bfloat16" for name in ("param", "moments")}
    config = tiny.config(
        algorithm__adv_estimator="reinforce_plus_plus",
        actor__optim__gradient_dtype="bfloat16",
        **options,
    )
    before, after, metrics = run_update(config, tiny.make_mesh(), ALL, 2)
    trained = [(state.actor, state.optimizers["actor"]) for state in (before, after)]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), trees) for trees in trained]
    assert shapes[0] == shapes[1]
    assert metrics["actor/grad_norm"] > 0
    assert np.any(before.actor["embed"]["embedding"] != after.actor["embed"]["embedding"])
    # Two bytes for each parameter and its moments, and the count of steps.
    elements = sum(x.size for x in jax.tree.leaves(after.actor))
    assert sum(x.nbytes for x in jax.tree.leaves(trained[1])) == 3 * 2 * elements + 4


def test_start_and_resume_have_the_types_of_the_options(tmp_path):
    config = tiny.config(
        algorithm__adv_estimator="reinforce_plus_plus",
        algorithm__use_reference=False,
        actor__optim__param_dtype="bfloat16",
        actor__optim__moments_dtype="bfloat16",
    )
    mesh, nets = tiny.make_mesh(), tiny.networks(config)
    params = tiny.init_params(nets.actor, jax.random.key(0), "lm")
    export_checkpoint(params, tiny.ARCHITECTURE, tmp_path / "actor")
    with jax.set_mesh(mesh):
        folders = Folders(actor=tmp_path / "actor")
        state = StateBuilder(config, nets, mesh).create(folders, lambda name: None)
        expected = StateBuilder(config, nets, mesh).trained_shapes()
        before = trained_trees(state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
            lambda x: (x.shape, x.dtype), expected
        )
        assert {x.dtype for x in jax.tree.leaves(before["actor"])} == {jnp.dtype("bfloat16")}
        with Checkpointer(tmp_path / "checkpoints", 1, "reward_mean", print) as checkpoints:
            checkpoints.save(1, before, {}, {})
            after, _ = checkpoints.restore(1, expected)
    jax.tree.map(np.testing.assert_array_equal, before, after)
