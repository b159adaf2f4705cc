"""Kernels of the decoder as int8, for decoding: half the bytes of bfloat16 to keep and to read.

A column w of a kernel [in, out] is stored as round(w / s) with s = max |w| / 127. The product is
computed in the type of the computation, which represents int8 exactly, and multiplied with s
afterwards. Embeddings, the projections of further embeddings, heads, norms, biases, routers, rates
and adapters keep their type. The columns of experts [E, in, out] have scales [E, out].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ppo.models.architecture import EXACT_PARAMETERS
from jax_ppo.types import Params

MAX_INT8 = 127
# A rounded router would choose other experts; rates and decays add up; the rest is small.
EXACT_MODULES = (
    "router",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
    "per_layer_input_gate",
    "per_layer_projection",
)


def round_parameters(params: Params, dtype: DTypeLike) -> Params:
    """Return parameters in a type, except what would select other experts if it were rounded."""

    def convert(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32 if path[-1].key in EXACT_PARAMETERS else dtype)

    return jax.tree_util.tree_map_with_path(convert, params)


def round_kernels(layers: Params, dtype: DTypeLike) -> Params:
    """Return stacked layers with kernels in their products' type, so that no loop stacks copies."""

    def convert(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        is_exact = any(part.key in EXACT_MODULES for part in path)
        return x.astype(dtype) if path[-1].key == "kernel" and not is_exact else x

    return jax.tree_util.tree_map_with_path(convert, layers)


def quantize_kernels(params: Params, dtype: DTypeLike) -> Params:
    """Return unrolled parameters with int8 kernels in layers, each beside its `kernel_scale`.

    `params` must not be rounded yet to `dtype`, the type of all other parameters.
    """

    def convert(tree: Params) -> Params:
        converted: Params = {}
        for name, value in tree.items():
            if name in EXACT_MODULES:
                converted[name] = round_parameters(value, dtype)
            elif isinstance(value, dict):
                converted[name] = convert(value)
            elif name == "kernel":
                wide = value.astype(jnp.float32)
                largest = jnp.max(jnp.abs(wide), axis=-2)
                # A column of zeros stays one.
                scale = jnp.where(largest > 0, largest / MAX_INT8, 1.0)
                int8 = jnp.round(wide / scale[..., None, :]).astype(jnp.int8)
                converted |= {"kernel": int8, "kernel_scale": scale}
            else:
                converted |= round_parameters({name: value}, dtype)
        return converted

    return {
        name: convert(value) if name.startswith("layer_") else round_parameters(value, dtype)
        for name, value in params.items()
    }


def converted_kernel(kernel: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a kernel in the type of the product with `x`; one of int8 only once `x` is there.

    A compiler that sees a conversion of what no step of the decode loop changes makes it before the
    loop, and keeps a wide copy of every kernel (XLA of jaxlib 0.12 for CPUs).
    """
    if kernel.dtype == jnp.int8:
        kernel, _ = jax.lax.optimization_barrier((kernel, x))
    return kernel.astype(dtype)
