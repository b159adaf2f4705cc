"""Our side of oracles.py: our kernels on the same cases, also with a peer's differences applied.

Runs in the process of oracles.py itself, in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.kernels import (
    advantages,
    importance,
    kl,
    logprobs,
    losses,
    masked,
    preferences,
    shaping,
)
from jax_ppo.registries import POLICY_LOSSES

FORMULA = 1e-7  # float64; allows for the 1e-8 that peers add to counts
FLOAT32 = 1e-5  # for values that a side computes in float32 regardless of its input

BESSEL = "the variance divides by n - 1; ours by n, which is defined for one token too"


class Result(NamedTuple):
    """Values, and their gradient if training uses one."""

    values: jax.Array
    gradient: jax.Array | None = None


class Row(NamedTuple):
    """One comparison with a peer.

    Attributes:
      ours: Result of our kernels.
      reason: How the peer differs and why we do not; empty if the results should be equal.
      theirs: Our result with that difference applied, which should equal the peer's.
      tolerance: Allowed difference relative to the peer's largest number.
    """

    ours: Result
    reason: str = ""
    theirs: Result | None = None
    tolerance: float = FORMULA


def differentiate(function: Callable, at: jax.Array, cotangents: jax.Array | None = None) -> Result:
    """Return function(at) and the gradient of its sum, weighted by `cotangents` if present."""
    values, pull = jax.vjp(function, at)
    return Result(
        values,
        pull(jnp.ones_like(values) if cotangents is None else cotangents.astype(values.dtype))[0],
    )


def aggregate(per_token, mask, mode, scale=None):
    """Aggregate per-token losses into the loss of a mini-batch."""
    return jnp.sum(
        losses.loss_weights(mask.sum(1), mode, scale)[:, None]
        * masked.zero_outside(per_token, mask)
    )


def policy_loss(
    case,
    name,
    mode,
    clip,
    advantages="advantages",
    old="old_logprobs",
    mask="mask",
    weights=1.0,
    scale=None,
    selected=None,
    **arguments,
):
    """Return value and gradient of one of our policy losses."""
    mask = case[mask]
    A = case[advantages]
    A = A if A.ndim == 2 else jnp.broadcast_to(A[:, None], mask.shape)

    def loss(logprobs):
        batch = losses.padded_batch(logprobs, case[old], A, mask)._replace(selected=selected)
        return aggregate(
            weights * POLICY_LOSSES[name].function(batch, clip, **arguments).loss,
            mask,
            mode,
            scale or mask.shape[1],
        )

    return differentiate(loss, case["logprobs"])


def clip_fractions(case, clip, old):
    """Return the shares of tokens affected by the clip and the dual clip."""
    result = losses.clipped_surrogate(
        losses.padded_batch(case["logprobs"], case[old], case["advantages"], case["mask"]), clip
    )
    return [
        Result(masked.masked_mean(flag, case["mask"]))
        for flag in (result.clipped, result.dual_clipped)
    ]


def unclamped_surrogate(log_ratio, A, clip):
    """Compute the clipped surrogate without clamping the ratios, for peers that do not."""
    ratio = jnp.exp(log_ratio)
    loss = jnp.maximum(-A * ratio, -A * jnp.clip(ratio, 1 - clip.low, 1 + clip.high))
    return loss if clip.dual is None else jnp.where(A < 0, jnp.minimum(loss, -A * clip.dual), loss)


def value_loss(case, clip, mask="mask", mode="token-mean"):
    mask = case[mask]
    return differentiate(
        lambda values: aggregate(
            losses.value_loss(values, case["old_values"], case["returns"], mask, clip).loss,
            mask,
            mode,
        ),
        case["values"],
    )


def kl_divergence(case, kind, reference, clip=None):
    """Evaluate a KL estimator; `clip` bounds its value as some peers do."""

    def estimate(logprobs):
        result = kl.kl_estimate(logprobs, case[reference], case["mask"], kind)
        return result if clip is None else jnp.clip(result, -clip, clip)

    return differentiate(estimate, case["logprobs"], case["cotangents"])


def unclamped_k3(case, reference):
    """Evaluate k3 without clamps."""

    def estimate(logprobs):
        d = masked.zero_outside(logprobs - case[reference], case["mask"])
        return jnp.expm1(-d) + d

    return differentiate(estimate, case["logprobs"], case["cotangents"])


def gae(case, rewards, mask, options, values="old_values"):
    batched = jax.vmap(
        lambda *sequence: advantages.gae(*sequence, options["gamma"], options["lam"])
    )
    return batched(rewards, case[values], mask)


def whitening_row(x, mask, **kwargs):
    """Whiten as we do, and with Bessel's correction."""
    ours, count, mean = masked.whiten(x, mask, **kwargs), mask.sum(), masked.masked_mean(x, mask)
    shift = 0 if kwargs.get("shift_mean", True) else mean
    theirs = masked.zero_outside((ours - shift) * jnp.sqrt((count - 1) / count) + shift, mask)
    return Row(Result(ours), BESSEL, Result(theirs))


def broadcast_to_tokens(per_response, mask):
    return jnp.where(mask.astype(bool), per_response[:, None], 0.0)


def last_token_mask(mask):
    """Return 1 on the last token of each response and 0 elsewhere."""
    return (jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1).astype(float)


def distribution_rows(case, options):
    """Yield log-probs and entropy with gradients to the hidden states; float32 as in our kernel."""

    def compute_output(i):
        return lambda hidden: logprobs.token_logprobs(
            hidden,
            case["unembedding"],
            case["targets"],
            case["mask"],
            options["temperature"],
            chunk_size=5,
        )[i]

    return {
        name: Row(
            differentiate(compute_output(i), case["hidden"], case["cotangents"]), tolerance=FLOAT32
        )
        for i, name in enumerate(("log-prob", "entropy"))
    }


def mean_of_two_micro_batches(case, mode="token-mean"):
    """Average two micro-batches, each with its own token count."""

    def loss(x):
        return (
            sum(
                aggregate(x[half], case["mask"][half], mode)
                for half in (slice(0, None, 2), slice(1, None, 2))
            )
            / 2
        )

    return differentiate(loss, case["losses"])


def adaptive_kl_row(case, options):
    coefficient, path = options["kl_coef"], []
    for current in case["kls"]:
        coefficient = kl.adaptive_kl_coef(
            coefficient, current, options["kl_target"], options["kl_horizon"], len(case["mask"])
        )
        path.append(coefficient)
    return Row(Result(jnp.stack(path)), tolerance=FLOAT32)


def importance_weights_row(case, level, old, options, **bounds):
    return Row(Result(importance_weights(case, level, old, options["threshold"], **bounds)))


def importance_weights(case, level, old, upper, **bounds):
    return importance.importance_weights(
        case["logprobs"], case[old], case["mask"], level, upper, **bounds
    )


def gdpo(case, n):
    """Return GDPO's advantages of the tokens, before whitening."""
    return broadcast_to_tokens(advantages.gdpo(case["components"], n, (1.0, 2.0)), case["mask"])


def overlong_row(case, longest=12, buffer=5, factor=1.0):
    return Row(
        Result(shaping.soft_overlong_penalty(case["mask"].sum(1), longest, buffer, factor)),
        tolerance=FLOAT32,
    )


def preference_loss(case, centering=0.0):
    """Return the loss of pairs of scores, with its gradient to the chosen ones."""

    def loss(chosen):
        pair = chosen, case["response_advantages"]
        return jnp.mean(
            preferences.bradley_terry(*pair) + centering * preferences.centering_penalty(*pair)
        )

    return differentiate(loss, case["scores"])
