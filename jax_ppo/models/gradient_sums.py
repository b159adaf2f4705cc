"""A loop over layers whose backward pass adds each layer's gradient to a sum.

The gradient of an ordinary loop is a separate tree beside the sum over micro-batches that it is
added to afterwards. Here the backward loop carries the sum and adds to it in place.

A backward loop carries the cotangents of what the forward loop carries. The forward loop therefore
carries a `slot` of the sum's shapes, which nothing reads, so that no memory is reserved for it. Its
cotangent starts as the sum so far, and in the backward pass each layer adds its gradient: the
"gradient" with respect to the slot is the new sum.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.types import Params

# The entry of a decoder's parameters, beside `layers`, that makes its loop over layers this one.
GRADIENT_SUM = "gradient_sum"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The sum that the gradients of stacked layers are added to."""

    slot: Params  # zeros like `total`; the gradient of a loss with respect to them is the new sum
    total: Params  # the sum of earlier micro-batches, a tree like the layers
    key: jax.Array | None  # random key of the micro-batch, for `add`
    # (a layer's part of the sum, its gradient, a key) -> the new part
    add: Callable[[Any, Any, jax.Array | None], Any] = dataclasses.field(metadata={"static": True})


def scan_layers(
    run_layer: Callable[[Params, jax.Array, Any], tuple[jax.Array, Any]],
    layers: Params,
    x: jax.Array,
    inputs: Any,
    gradient_sum: GradientSum | None,
    unroll: int,
) -> tuple[jax.Array, Any]:
    """Run layers one after the other; return hidden states and their further outputs, [L, ...].

    Args:
      run_layer: (a layer's parameters, hidden states, its inputs) -> (hidden states, further
        outputs).
      layers: stacked parameters, [L, ...].
      x: hidden states, the input of the first layer.
      inputs: of each layer, [L, ...].
      gradient_sum: what the layers' gradients are added to, for a loss differentiated with respect
        to the slot; `None`: an ordinary loop.
      unroll: layers per iteration of the loop.
    """
    if gradient_sum is None:
        return jax.lax.scan(
            lambda x, layer: run_layer(layer[0], x, layer[1]), x, (layers, inputs), unroll=unroll
        )

    def step(carry: tuple[jax.Array, Params], per_layer: Any) -> tuple[Any, Any]:
        x, slot = carry
        i, layer, layer_inputs = per_layer
        layer, slot = _add_in_backward_pass(gradient_sum.add, layer, slot, i, gradient_sum.key)
        x, output = run_layer(layer, x, layer_inputs)
        return (x, slot), output

    numbers = jnp.arange(len(jax.tree.leaves(layers)[0]))
    (x, slot), outputs = jax.lax.scan(
        step, (x, gradient_sum.slot), (numbers, layers, inputs), unroll=unroll
    )
    return _start_in_backward_pass(x, slot, gradient_sum.total), outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_in_backward_pass(
    add: Callable[..., Any], layer: Params, slot: Params, i: jax.Array, key: jax.Array | None
) -> tuple[Params, Params]:
    """Return layer and slot; the layer's gradient is added to part i of the slot's cotangent."""
    return layer, slot


def _keep_place(
    add: Callable[..., Any], layer: Params, slot: Params, i: jax.Array, key: jax.Array | None
) -> tuple[tuple[Params, Params], tuple[jax.Array, jax.Array | None]]:
    return (layer, slot), (i, key)


def _add_gradient(
    add: Callable[..., Any],
    place: tuple[jax.Array, jax.Array | None],
    cotangents: tuple[Params, Params],
) -> tuple[None, Params, None, None]:
    i, key = place
    gradient, total = cotangents
    part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), total)
    part = add(part, gradient, None if key is None else jax.random.fold_in(key, i))
    total = jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, axis=0), total, part
    )
    return None, total, None, None


_add_in_backward_pass.defvjp(_keep_place, _add_gradient)


@jax.custom_vjp
def _start_in_backward_pass(x: jax.Array, slot: Params, total: Params) -> jax.Array:
    """Return x; the slot's cotangent is `total`."""
    return x


_start_in_backward_pass.defvjp(
    lambda x, slot, total: (x, total), lambda total, x_grad: (x_grad, total, None)
)
