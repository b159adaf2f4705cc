"""Transformations of a sample's score before it becomes a reward; all map float32 [B] to [B]."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Shaped

from jax_ppo.kernels import moments as moments_lib


def soft_overlong_penalty(
    lengths_B: Integer[Array, " B"], longest: int, buffer: int, factor: float
) -> Float[Array, " B"]:
    """Return the amount to add to the score of a long response.

        0                                               length <= longest - buffer
        -factor (length - (longest - buffer)) / buffer  in between
        -factor                                         length >= longest

    DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13), times `factor`. It changes the objective on
    purpose: of two responses of equal score, the shorter is better once the longer ends within
    the buffer.

    Args:
      lengths_B: tokens of each response, those that a tool inserted included, as in the limit on
        its length.
      longest: length of a response that was cut off.
      buffer: tokens over which the penalty grows, 1 to `longest`.
      factor: >= 0, in units of score; 1 in the paper.

    Returns:
      float32 [B] in [-factor, 0].
    """
    assert 0 < buffer <= longest, (
        f"a buffer of {buffer} tokens does not fit a response of {longest}"
    )
    over = lengths_B.astype(jnp.float32) - (longest - buffer)
    return -factor * jnp.clip(over / buffer, 0.0, 1.0)


def normalize_scores(
    scores_B: Shaped[Array, " B"], moments: moments_lib.Moments, shift: bool
) -> Float[Array, " B"]:
    """Return (s - mean) / std, or s / std without `shift`.

    Mean and std come from `moments`, taken over earlier scores or over reference scores.

    Dividing never changes which of two scores is better. It changes what a nat of KL or a token
    of length penalty costs relative to them: their coefficients then count standard deviations.

    The shift adds one constant to every score. Where gamma = 1 and every response ends with such
    a score, that is a baseline and moves no optimum. It moves the optimum where the constant does
    not reach all responses equally: at gamma < 1, where a response below the mean gains by ending
    late and one above it by ending early; and if fixed rewards replace some scores (a penalty for
    a missing end, 0 for a response that is left out), which a score of zero exceeds before the
    shift and may fall below after it. Without shift 0 stays 0.

    With running moments either form drifts: equal scores become different rewards later in the
    run, which the critic has to follow.
    """
    scores_B = scores_B.astype(jnp.float32)
    if shift:
        return moments_lib.normalize_by_moments(scores_B, moments)
    return scores_B / moments_lib.moments_std(moments)
