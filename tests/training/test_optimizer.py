"""The learning rate's schedules, and Muon; AdamW is in tests/ppo/test_update.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.config.schema import Optim
from jax_ppo.runtime.sharding import TRAIN_RULES, tree_shardings
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer, rounding_keys
from jax_ppo.training.random_streams import Stream

MUON = Optim(optimizer="muon", weight_decay=0.0)


@pytest.mark.parametrize(
    ("schedule", "half_way", "end"),
    # From 2 to a quarter of it: the cosine is half way between them in the middle, as the line is.
    [("constant", 2.0, 2.0), ("linear", 1.25, 0.5), ("cosine", 1.25, 0.5)],
)
def test_a_schedule_ends_at_its_floor_and_stays_there(schedule, half_way, end):
    options = Optim(lr=2.0, lr_warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.25)
    rates = [float(learning_rate(options, jnp.int32(step), 10)) for step in (2, 6, 10, 11, 1000)]
    np.testing.assert_allclose(rates, [2.0, half_way, end, end, end], rtol=1e-6)


def random_tree(seed, dtype=np.float32):
    """Return parameters, or gradients, with every kind of leaf."""
    r = np.random.default_rng(seed)
    shapes = {
        "embed": {"embedding": (32, 8)},
        "layers": {
            "q_proj": {"kernel": (2, 8, 16), "bias": (2, 16)},
            "mlp": {
                "router": {"kernel": (2, 8, 4)},
                "experts": {"up_proj": {"kernel": (2, 4, 8, 6)}},
            },
            "input_norm": {"scale": (2, 8)},
        },
        "score": {"kernel": (8, 1)},
    }
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: r.normal(size=shape).astype(dtype), shapes, is_leaf=is_shape)


def take_steps(options, params, state, seeds, key=None):
    transform = make_optimizer(options, 1.0)
    for seed in seeds:
        stored_key = None if key is None else rounding_keys(key, Stream.ACTOR_ROUNDING, state)[0]
        params, state, *_ = descend(
            transform, params, state, random_tree(seed), jnp.float32(0.1), key=stored_key
        )
    return params, state


@pytest.mark.slow
def test_muon_takes_orthogonal_steps_in_matrices_and_adamws_elsewhere():
    """Newton-Schulz brings singular values to about 1; the singular vectors stay the gradient's."""
    params = random_tree(0)
    moved = {}
    for name in ("muon", "adamw"):
        options = dataclasses.replace(MUON, optimizer=name)
        moved[name], _ = take_steps(options, params, make_optimizer(options, 1.0).init(params), [1])
    gradients = random_tree(1)
    for names in (("q_proj",), ("mlp", "experts", "up_proj")):
        old, new, gradient = params["layers"], moved["muon"]["layers"], gradients["layers"]
        for name in (*names, "kernel"):
            old, new, gradient = old[name], new[name], gradient[name]
        longer = max(old.shape[-2:])
        step = (old - np.asarray(new)) / (0.1 * 0.2 * longer**0.5)
        u, _, v = np.linalg.svd(gradient, full_matrices=False)
        inside = np.swapaxes(u, -1, -2) @ step @ np.swapaxes(v, -1, -2)
        diagonal = np.diagonal(inside, axis1=-2, axis2=-1)
        assert diagonal.min() > 0.6 and diagonal.max() < 1.3
        off_diagonal = inside - diagonal[..., None] * np.eye(diagonal.shape[-1])
        np.testing.assert_allclose(off_diagonal, 0, atol=2e-3)
    flat = {name: jax.tree_util.tree_flatten_with_path(tree)[0] for name, tree in moved.items()}
    for (path, ours), (_, adamws) in zip(flat["muon"], flat["adamw"], strict=True):
        is_matrix = "q_proj" in str(path) and "kernel" in str(path) or "experts" in str(path)
        assert np.array_equal(ours, adamws) != is_matrix, path


def test_muon_keeps_one_moment_of_matrices():
    params = random_tree(0)
    state = make_optimizer(dataclasses.replace(MUON, moments_dtype="bfloat16"), 1.0).init(params)
    sizes = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if x.ndim and "ns_coeffs" not in names:
            assert x.dtype == jnp.bfloat16
            sizes["muon" if "muon" in names else "adamw"] = (
                sizes.get("muon" if "muon" in names else "adamw", 0) + x.size
            )
        elif "ns_coeffs" in names:
            assert x.dtype == jnp.float32
    matrices = 2 * 8 * 16 + 2 * 4 * 8 * 6
    total = sum(x.size for x in jax.tree.leaves(params))
    assert sizes == {"muon": matrices, "adamw": 2 * (total - matrices)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_continues_from_a_checkpoint_bit_for_bit(tmp_path, dtype):
    options = dataclasses.replace(MUON, param_dtype=dtype, moments_dtype=dtype)
    key = 5 if dtype == "bfloat16" else None
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_tree(0))
    start = make_optimizer(options, 1.0).init(params)
    whole = take_steps(options, params, start, [1, 2, 3, 4], key)
    half = take_steps(options, params, start, [1, 2], key)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, {"actor": half[0], "optimizer": {"actor": half[1]}}, {})
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), half
        )
        read, _ = checkpoints.restore(2, {"actor": shapes[0], "optimizer": {"actor": shapes[1]}})
    resumed = take_steps(options, read["actor"], read["optimizer"]["actor"], [3, 4], key)
    assert jax.tree.structure(resumed) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


@pytest.mark.exhaustive
def test_muon_on_a_mesh_takes_the_steps_of_one_device():
    options = {"actor__optim__optimizer": "muon", "algorithm__adv_estimator": "reinforce_plus_plus"}
    config = tiny.config(**options)
    results = []
    for rows, mesh in ((4, tiny.make_mesh()), (8, tiny.make_mesh(8, data=2, fsdp=2, model=2))):
        with jax.set_mesh(mesh):
            state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
            layout = tree_shardings(mesh, state.optimizers, TRAIN_RULES)
            experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=8)
            batches = tiny.pack_batches(config, mesh, rollout, [[0, 2, 4, 6], [1, 3, 5, 7]], rows)
            state, _ = tiny.update_state(
                config, tiny.networks(config), 4, state, experience, batches, None
            )
            for x, expected in zip(
                jax.tree.leaves(state.optimizers), jax.tree.leaves(layout), strict=True
            ):
                assert x.sharding.is_equivalent_to(expected, x.ndim)
        results.append(jax.device_get(state.models["actor"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), *results)
