"""What oracles.py compares with: our kernels on the same cases, and, where a peer differs, ours with its difference put in.

In the process of oracles.py itself, in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.kernels import advantages, importance, kl, logprobs, losses, masked, policy_losses

FORMULA = 1e-7  # float64; holds the 1e-8 that peers add to counts
FLOAT32 = 1e-5  # for what one of the sides computes in float32 whatever it is given

BESSEL = "the variance divides by n - 1; ours by n, which is defined for one token too"


class Found(NamedTuple):
    """Values, and their gradient where training takes one."""

    values: jax.Array
    gradient: jax.Array | None = None


class Row(NamedTuple):
    """One thing that a peer was asked.

    Attributes:
      ours: what our kernels give.
      reason: how the peer differs and why we do not do so; empty where it should give the same.
      theirs: ours with that difference put in, which should be the peer's.
      tolerance: of the difference, relative to the largest number of the peer's.
    """

    ours: Found
    reason: str = ""
    theirs: Found | None = None
    tolerance: float = FORMULA


def graded(function: Callable, at: jax.Array, cotangents: jax.Array | None = None) -> Found:
    """function(at), and the gradient of it, or of sum cotangents * function(at)."""
    values, pull = jax.vjp(function, at)
    return Found(
        values,
        pull(jnp.ones_like(values) if cotangents is None else cotangents.astype(values.dtype))[0],
    )


def weigh(per_token, mask, mode, scale=None):
    """The loss of a mini-batch."""
    return jnp.sum(
        losses.loss_weights(mask.sum(1), mode, scale)[:, None]
        * masked.zero_outside(per_token, mask)
    )


def policy(
    case,
    name,
    mode,
    clip,
    advantages="advantages",
    old="old_logprobs",
    mask="mask",
    weights=1.0,
    scale=None,
):
    """Value and gradient of one of our policy losses."""
    mask = case[mask]
    A = case[advantages]
    A = A if A.ndim == 2 else jnp.broadcast_to(A[:, None], mask.shape)

    def loss(logprobs):
        batch = policy_losses.padded_batch(logprobs, case[old], A, mask)
        return weigh(
            weights * policy_losses.LOSSES[name](batch, clip).loss,
            mask,
            mode,
            scale or mask.shape[1],
        )

    return graded(loss, case["logprobs"])


def flags(case, clip, old):
    """Shares of tokens that the clip and the dual clip hold."""
    found = losses.policy_loss(case["logprobs"], case[old], case["advantages"], case["mask"], *clip)
    return [
        Found(masked.masked_mean(flag, case["mask"]))
        for flag in (found.clipped, found.dual_clipped)
    ]


def surrogate(log_ratio, A, clip):
    """The clipped surrogate of ratios that are not clamped, for peers that do not clamp them."""
    ratio = jnp.exp(log_ratio)
    loss = jnp.maximum(-A * ratio, -A * jnp.clip(ratio, 1 - clip.low, 1 + clip.high))
    return loss if clip.dual is None else jnp.where(A < 0, jnp.minimum(loss, -A * clip.dual), loss)


def value(case, clip, mask="mask", mode="token-mean"):
    mask = case[mask]
    return graded(
        lambda values: weigh(
            losses.value_loss(values, case["old_values"], case["returns"], mask, clip).loss,
            mask,
            mode,
        ),
        case["values"],
    )


def divergence(case, kind, reference, clip=None):
    """A KL estimator; `clip` cuts its value off as some peers do."""

    def estimate(logprobs):
        found = kl.kl_estimate(logprobs, case[reference], case["mask"], kind)
        return found if clip is None else jnp.clip(found, -clip, clip)

    return graded(estimate, case["logprobs"], case["cotangents"])


def plain_k3(case, reference):
    """k3 without clamps."""

    def estimate(logprobs):
        d = masked.zero_outside(logprobs - case[reference], case["mask"])
        return jnp.expm1(-d) + d

    return graded(estimate, case["logprobs"], case["cotangents"])


def gae(case, rewards, mask, options, values="old_values"):
    batched = jax.vmap(
        lambda *sequence: advantages.gae(*sequence, options["gamma"], options["lam"])
    )
    return batched(rewards, case[values], mask)


def whitened(x, mask, **kwargs):
    """Ours, and with Bessel's correction."""
    ours, count, mean = masked.whiten(x, mask, **kwargs), mask.sum(), masked.masked_mean(x, mask)
    kept = 0 if kwargs.get("shift_mean", True) else mean
    theirs = masked.zero_outside((ours - kept) * jnp.sqrt((count - 1) / count) + kept, mask)
    return Row(Found(ours), BESSEL, Found(theirs))


def of_responses(per_response, mask):
    return jnp.where(mask.astype(bool), per_response[:, None], 0.0)


def last_token(mask):
    """1 on the last token of each response."""
    return (jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1).astype(float)


def distributions(case, options):
    """Log-probs and entropy, with the gradient to the hidden states; float32, as our kernel gives them."""

    def ask(i):
        return lambda hidden: logprobs.token_logprobs(
            hidden,
            case["unembedding"],
            case["targets"],
            case["mask"],
            options["temperature"],
            chunk_size=5,
        )[i]

    return {
        name: Row(graded(ask(i), case["hidden"], case["cotangents"]), tolerance=FLOAT32)
        for i, name in enumerate(("log-prob", "entropy"))
    }


def in_halves(case, mode="token-mean"):
    """The mean of what two micro-batches give, each with its own count of tokens."""

    def loss(x):
        return (
            sum(
                weigh(x[half], case["mask"][half], mode)
                for half in (slice(0, None, 2), slice(1, None, 2))
            )
            / 2
        )

    return graded(loss, case["losses"])


def adaptive(case, options):
    coefficient, path = options["kl_coef"], []
    for current in case["kls"]:
        coefficient = kl.adaptive_kl_coef(
            coefficient, current, options["kl_target"], options["kl_horizon"], len(case["mask"])
        )
        path.append(coefficient)
    return Row(Found(jnp.stack(path)), tolerance=FLOAT32)


def weights_of(case, level, old, options):
    return Row(
        Found(
            importance.truncated_weights(
                case["logprobs"], case[old], case["mask"], level, options["threshold"]
            )
        )
    )
