"""Low-rank adapters (Hu et al. 2021, LoRA).

Next to a frozen kernel W [in, out] they train A [in, r] and B [r, out], and x W becomes

    x W + alpha / r (x A) B

The adapters of a role are a dict with the structure of the decoder's parameters, so that several
roles can share one base:

    layers/{attention, mlp, ...}/{q_proj, ...}/{lora_a [L, in, r], lora_b [L, r, out]}
    score/kernel [D, 1] for a role with a scalar head

B starts at zero, and x W + 0 equals x W bit for bit. During training the product is never added to
W, not even for decoding: in bfloat16 the sum W + A B would round small changes away, and the
sampler would draw from another policy than the one that is trained.
"""

import dataclasses
import re
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Float

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.names import adapter_tensor_table
from jax_ppo.types import Params


@dataclasses.dataclass(frozen=True)
class Lora:
    """The shape of adapters. Hashable: it is a static argument of compiled functions."""

    rank: int  # r
    alpha: float  # numerator of the scale
    targets: tuple[str, ...]  # projections that have adapters, in every layer

    @property
    def scale(self) -> float:
        """Return the factor on (x A) B."""
        return self.alpha / self.rank


def init_adapters(architecture: Architecture, lora: Lora, key: jax.Array, head: str) -> Params:
    """Return float32 adapters that change nothing yet.

    As in PEFT, A is uniform in +- 1 / sqrt(in); B and a scalar head are zero.
    """
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    params = {}
    for number, (path, row) in enumerate(sorted(rows.items())):
        if path[-1] != "lora_a":
            params[path] = jnp.zeros(row.full_shape, jnp.float32)
            continue
        bound = row.shape[0] ** -0.5
        # Each tensor has a separate key, by its place in the sorted table.
        params[path] = jax.random.uniform(
            jax.random.fold_in(key, number), row.full_shape, minval=-bound, maxval=bound
        )
    return traverse_util.unflatten_dict(params)


def enlarge_adapters(adapters: Params, lora: Lora) -> Params:
    """Return adapters with random B, which change the outputs of projections noticeably."""
    flat = traverse_util.flatten_dict(adapters)
    for number, (path, x) in enumerate(sorted(flat.items())):
        if path[-1] == "lora_b":
            noise = jax.random.normal(jax.random.key(number), x.shape, x.dtype)
            flat[path] = x + 0.3 * noise / (lora.rank**0.5 * lora.scale)
    return traverse_util.unflatten_dict(flat)


def omit_adapters(adapters: Params, projections: Collection[str]) -> Params:
    """Return the adapters with zeros for some projections, in all layers."""
    flat = traverse_util.flatten_dict(adapters)
    omitted = {path: jnp.zeros_like(x) for path, x in flat.items() if path[-2] in projections}
    return traverse_util.unflatten_dict(flat | omitted)


def join_params(base: Params, others: Params) -> Params:
    """Return one tree of base and adapters, or of other parts. Nothing is copied."""
    flat = traverse_util.flatten_dict(base) | traverse_util.flatten_dict(others)
    return traverse_util.unflatten_dict(flat)


def split_params(params: Params, pattern: str) -> tuple[Params, Params]:
    """Return the parameters whose path, "layers/mlp/...", lacks the pattern, and the others."""
    flat = traverse_util.flatten_dict(params, sep="/")
    others = {path: x for path, x in flat.items() if re.search(pattern, path)}
    base = {path: x for path, x in flat.items() if path not in others}
    return tuple(traverse_util.unflatten_dict(part, sep="/") for part in (base, others))


def merge_kernel(
    kernel: Float[Array, "inputs outputs"],
    lora_a: Float[Array, "inputs rank"],
    lora_b: Float[Array, "rank outputs"],
    scale: float,
) -> Float[Array, "inputs outputs"]:
    """Return the float32 kernel that includes its adapters: W + scale A B."""
    product = jnp.matmul(  # in float32 and at full precision: the merged kernel is exported
        lora_a.astype(jnp.float32), lora_b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return kernel.astype(jnp.float32) + scale * product
