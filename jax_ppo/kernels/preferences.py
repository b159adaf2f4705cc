"""Learning a reward from preferences between two responses."""

import jax


def bradley_terry(chosen, rejected):
    """Negative log-likelihood that the chosen one of two responses is preferred, as Bradley and Terry (1952) model it:

        -log sigmoid(chosen - rejected)

    as reward models are trained by (Christiano et al. 2017, arXiv:1706.03741; Ouyang et al. 2022, arXiv:2203.02155, eq. 1,
    which takes the mean over pairs).

    Args:
      chosen, rejected: float [...], scores of the two; only their difference counts.

    Returns:
      float [...], more than 0; log 2 where the scores are equal.
    """
    return -jax.nn.log_sigmoid(chosen - rejected)


def centering_penalty(chosen, rejected):
    """(chosen + rejected)^2, which draws the scores of a pair to a mean of 0: the likelihood leaves their level open
    (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).

    Args:
      chosen, rejected: float [...].

    Returns:
      float [...].
    """
    return (chosen + rejected) ** 2
