"""The mask selects the tokens that the policy chose, which need not be contiguous.

Tokens that a tool inserted leave holes in a response. Each kernel must return the same numbers as
without the holes, on a copy in which the selected tokens of each row are moved to its front.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import advantages, importance, kl, logprobs, losses, vocabulary_kl
from jax_ppo.kernels import masked_statistics as masked
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.registries import AGGREGATIONS, IMPORTANCE_WEIGHTS, POLICY_LOSSES
from kernels_by_name import KL, LEVELS
from padded_loss import padded_loss

MASK = np.array(
    [
        [1, 1, 0, 0, 1, 1, 1, 0],
        [0, 1, 0, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],  # one that has no holes
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
)
B, T = MASK.shape
WIDTH, VOCABULARY = 4, 11
PER_TOKEN = ("rewards", "values", "logprobs", "old_logprobs", "returns", "targets", "hidden")


def kernels(batch, unembedding, mask):
    """Return the result of every kernel that takes a mask: [B, T] per token, else of any shape."""
    rewards, values, returns = batch["rewards"], batch["values"], batch["returns"]
    now, old, hidden = batch["logprobs"], batch["old_logprobs"], batch["hidden"]
    counts_B = mask.sum(1)
    gae = jax.vmap(advantages.gae, in_axes=(0, 0, 0, None, 0, 0))
    lam_B = advantages.length_adaptive_lam(counts_B, 0.5)
    results = dict(
        zip(("gae", "returns"), gae(rewards, values, mask, 0.9, lam_B, lam_B), strict=True)
    )
    results["length_adaptive_lam"] = lam_B
    # A number above 0 starts a turn, here also without a hole before it.
    for name, options in (("turn_gae", (0.9, 0.8)), ("bi_level_gae", (0.9, 0.8, 0.7, 0.6))):
        estimator = getattr(advantages, name)
        pair = jax.vmap(lambda *parts, f=estimator, o=options: f(*parts, *o))(
            rewards, values, mask, old > -0.5
        )
        results |= dict(zip((name, f"{name} returns"), pair, strict=True))
    to_go = jax.vmap(advantages.reward_to_go, in_axes=(0, 0, None))
    results["reward_to_go"] = to_go(rewards, mask, 0.9)

    # Holes separate turns.
    for level in IMPORTANCE_WEIGHTS.keys() - {"none", "turn"}:
        weights = importance.importance_weights(now, old, mask, log_weight=LEVELS[level], upper=3.0)
        results[f"importance_weights {level}"] = weights
    results |= importance.mismatch(now, old, mask)
    for kind in KL:
        results[f"kl {kind}"] = kl.kl_estimate(now, old, mask, KL[kind])

    for axis in (None, 1):
        results[f"masked_sum {axis}"] = masked.masked_sum(values, mask, axis)
        results[f"masked_mean {axis}"] = masked.masked_mean(values, mask, axis)
    results["masked_variance"] = masked.masked_variance(values, mask)
    results["masked_min"] = masked.masked_min(values, mask)
    results["masked_max"] = masked.masked_max(values, mask)
    results["whiten"] = masked.whiten(values, mask)
    results["explained_variance"] = masked.explained_variance(values, returns, mask)
    results["moments"] = jnp.stack(masked.update_moments(masked.empty_moments(), values, mask))

    for name in POLICY_LOSSES:
        clip = Clip(low=0.2, high=0.3, dual=3.0)

        def total(now, name=name, clip=clip):
            result = padded_loss(name, padded_batch(now, old, returns, mask), clip)
            return result.loss.sum(), result

        gradient, result = jax.grad(total, has_aux=True)(now)
        results[f"{name} gradient"] = gradient
        results |= {f"{name} {field}": x for field, x in result._asdict().items()}
    value_loss = losses.value_loss(values, old, returns, mask, clip=0.2).loss
    results["value_loss"] = value_loss
    for mode in AGGREGATIONS:
        weights_B = losses.loss_weights(counts_B, AGGREGATIONS[mode].function, 5.0)
        results[f"loss {mode}"] = jnp.sum(weights_B[:, None] * value_loss)

    options = LogitOptions(0.7, chunk_size=2)
    scores = logprobs.token_logprobs(hidden, unembedding, batch["targets"], mask, options)
    results |= dict(zip(("token_logprobs", "entropy"), scores, strict=True))
    results["full_kl"] = vocabulary_kl.full_kl(
        hidden, unembedding, hidden[..., ::-1], unembedding, mask, options
    )
    return results


NAMES = sorted(
    jax.eval_shape(
        kernels,
        {
            name: jax.ShapeDtypeStruct(
                (B, T, WIDTH) if name == "hidden" else (B, T),
                jnp.int32 if name == "targets" else jnp.float32,
            )
            for name in PER_TOKEN
        },
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )
)
ORDER = np.argsort(1 - MASK, axis=1, kind="stable")  # selected tokens first, in their own order
COMPACT_MASK = np.take_along_axis(MASK, ORDER, axis=1)


@pytest.fixture(scope="module")
def results():
    """Kernels on rows with holes, on rows without holes, and on as many leading tokens."""
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(0, 1, (B, T)).astype(np.float32) for name in PER_TOKEN}
    batch["logprobs"], batch["old_logprobs"] = -rng.exponential(1, (2, B, T)).astype(np.float32)
    # The extremes are behind a hole, where as many tokens from the front do not reach.
    batch["values"][0, 5:7] = 4, -4
    batch["logprobs"][0, 6], batch["old_logprobs"][0, 6] = -0.01, -9
    batch["hidden"] = rng.normal(0, 1, (B, T, WIDTH)).astype(np.float32)
    batch["targets"] = rng.integers(0, VOCABULARY, (B, T)).astype(np.int32)
    unembedding = rng.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32)

    def with_garbage(x):
        mask = MASK if x.ndim == 2 else np.broadcast_to(MASK[..., None], x.shape)
        return np.where(mask == 1, x, np.nan if x.dtype == np.float32 else -1).astype(x.dtype)

    def compact(x):
        order = ORDER if x.ndim == 2 else ORDER[..., None]
        return np.take_along_axis(x, order, axis=1)

    dirty = {name: with_garbage(x) for name, x in batch.items()}
    run = jax.jit(kernels)
    return {
        "holes": run(dirty, unembedding, MASK),
        "compact": run({name: compact(x) for name, x in dirty.items()}, unembedding, COMPACT_MASK),
        "prefix": run(batch, unembedding, COMPACT_MASK),
    }


# Functions of the counts alone, which are the same wherever the selected tokens are.
OF_COUNTS = {"length_adaptive_lam"}
# The flags of the losses, few enough that another choice of tokens may set the same ones.
FLAGS = {f"{name} {flag}" for name in POLICY_LOSSES for flag in ("clipped", "dual_clipped")}


@pytest.mark.parametrize("name", NAMES)
def test_a_hole_changes_nothing(name, results):
    with_holes, compact = (np.asarray(results[case][name]) for case in ("holes", "compact"))
    if with_holes.shape == (B, T):
        outside = 1 if name.endswith(" ratio") else 0
        np.testing.assert_array_equal(with_holes[MASK == 0], outside)
        with_holes, compact = with_holes[MASK == 1], compact[COMPACT_MASK == 1]
    np.testing.assert_allclose(with_holes, compact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*NAMES} - OF_COUNTS - FLAGS))
def test_the_comparison_sees_a_kernel_that_takes_tokens_from_the_front(name, results):
    """A kernel that reads the mask as a length would give the results of the prefix mask."""
    prefix, compact = (np.asarray(results[case][name]) for case in ("prefix", "compact"))
    assert not np.allclose(prefix, compact, rtol=1e-3, atol=1e-3)
