"""What is done to the score of a sample before it becomes a reward. All [B] to [B], float32."""

import jax
import jax.numpy as jnp

from jax_ppo.kernels import moments as moments_lib


def soft_overlong_penalty(
    lengths_B: jax.Array, longest: int, buffer: int, factor: float
) -> jax.Array:
    """What is added to the score of a long response (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13, times `factor`).

        0                                               length <= longest - buffer
        -factor (length - (longest - buffer)) / buffer  in between
        -factor                                         length >= longest

    It changes what is learnt, and means to: of two responses of one score the shorter is better once it would end within
    the buffer.

    Args:
      lengths_B: tokens of each response, those that a tool inserted included, as in the limit on its length.
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


def normalize_scores(scores_B: jax.Array, moments: moments_lib.Moments, shift: bool) -> jax.Array:
    """(s - mean) / std with shift, s / std without; mean and std are those of `moments`, of earlier or reference scores.

    The scale never changes which of two scores is better. It changes what a nat of KL or a token of length penalty costs
    beside them: their coefficients then count standard deviations.

    The shift adds one constant to the score of every response. Where gamma = 1 and every response ends with such a score, that
    is a baseline and moves no optimum. It moves it where a constant does not reach all alike: at gamma < 1, where a response
    below the mean gains by ending late and one above it by ending early; and beside fixed rewards given in the place of
    a score (a penalty for a missing end, 0 for a response that is left out), which a score of zero before the shift
    may exceed and after it fall below. Without shift 0 stays 0.

    With running moments either one drifts: one score is another reward later in the run, which the critic has to follow.
    """
    scores_B = scores_B.astype(jnp.float32)
    return (scores_B - moments.mean if shift else scores_B) / moments_lib.moments_std(moments)
