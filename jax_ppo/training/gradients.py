"""The gradient of a micro-batch, added to the sum over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.models.gradient_sums import GRADIENT_SUM, GradientSum
from jax_ppo.runtime.parallelism.pipeline import num_stages
from jax_ppo.training.stochastic_rounding import add_gradients
from jax_ppo.types import Params


def add_gradient(
    loss: Callable[[Params], tuple[jax.Array, Any]],
    params: Params,
    total: Params,
    key: jax.Array | None,
    trains_layers: bool = True,
) -> tuple[Params, Any]:
    """Return `total` with the gradient of `loss` added, and the auxiliary output of `loss`.

    The gradients of layers are added while they are computed (`models.gradient_sums`), which saves
    a tree of them.

    Args:
      loss: parameters -> (value, auxiliary output); it runs the decoder on them once.
      params: parameters, or adapters.
      total: as `zero_gradients` starts it.
      key: random key of the micro-batch; `None` if the sum is wider than bfloat16.
      trains_layers: `False` if `params` are adapters, whose gradients are small.
    """
    # Stages run their layers for several micro-batches, and add these gradients up themselves.
    if not trains_layers or num_stages() > 1:
        gradients, aux = jax.grad(loss, has_aux=True)(params)
        return add_gradients(total, gradients, key), aux
    layers = params["layers"]

    def loss_by_slot(others: Params, slot: Params) -> tuple[jax.Array, Any]:
        gradient_sum = GradientSum(slot, total["layers"], key, add_gradients)
        return loss({**others, "layers": layers, GRADIENT_SUM: gradient_sum})

    slot = jax.tree.map(jnp.zeros_like, total["layers"])
    gradient = jax.grad(loss_by_slot, argnums=(0, 1), has_aux=True)
    (gradients, layers_total), aux = gradient(_without_layers(params), slot)
    return add_gradients(_without_layers(total), gradients, key) | {"layers": layers_total}, aux


def _without_layers(tree: Params) -> Params:
    return {name: value for name, value in tree.items() if name != "layers"}
