"""Losses that train a reward model on preferences between two responses."""

import jax
from jaxtyping import Array, Float


def bradley_terry(
    chosen: Float[Array, " *shape"], rejected: Float[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return the negative log-likelihood of each preference under Bradley and Terry (1952).

        -log sigmoid(chosen - rejected)

    Reward models are trained by its mean over pairs (Christiano et al. 2017, arXiv:1706.03741;
    Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    Only the difference of the two scores of a pair matters. Losses are > 0, and log 2 where the
    scores are equal.
    """
    # log_sigmoid, since the sigmoid of a large negative difference underflows to 0.
    return -jax.nn.log_sigmoid(chosen - rejected)


def centering_penalty(
    chosen: Float[Array, " *shape"], rejected: Float[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """Return (chosen + rejected)^2, which pulls the mean score of a pair to 0.

    The likelihood depends on differences alone and leaves the level of the scores undetermined
    (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    return (chosen + rejected) ** 2
