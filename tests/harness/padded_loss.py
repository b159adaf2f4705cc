"""Policy losses of the registry on batches with one response per row."""

from jax_ppo.kernels.losses import row_sum
from jax_ppo.registries import POLICY_LOSSES, inputs_named


def padded_loss(name, batch, clip):
    """Return the PolicyLoss of a `padded_batch`."""
    function = POLICY_LOSSES[name].function
    inputs = {"batch": batch, "clip": clip, "sequence_sum": row_sum}
    return function(**inputs_named(function, inputs))
