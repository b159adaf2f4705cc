"""Low-rank adapters (Hu et al. 2021, LoRA): beside a frozen kernel W [in, out] trained A [in, r] and B [r, out], which make of
x W the sum x W + alpha / r (x A) B.

A role's adapters are a dict of their own in the decoder's structure, so that several roles can stand on one base:
    layers/{attention, mlp}/{q_proj, ...}/{lora_a [L, in, r], lora_b [L, r, out]}
    score/kernel [D, 1] for a role with a scalar head
B is zero at first, and x W + 0 is x W to the bit. The product is not added to W while anything is learned, for decoding
neither: in bfloat16 a sum W + A B would round small changes away, and the sampler would draw from another policy than the one
that is scored. Beside W the adapters of a decoding step are few bytes to read.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import traverse_util

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.names import adapter_tensor_table


@dataclasses.dataclass(frozen=True)
class Lora:
    """The shape of adapters. Hashable: it is a static argument of compiled functions.

    Attributes:
      rank: r.
      alpha: see above.
      targets: the projections that have adapters, in every layer.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor on (x A) B."""
        return self.alpha / self.rank


def init_adapters(architecture: Architecture, lora: Lora, key, head: str) -> dict:
    """Adapters that change nothing yet: A uniform in +- 1 / sqrt(in), as PEFT has it, B and a scalar head zero. float32."""
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    params = {}
    for number, (path, row) in enumerate(sorted(rows.items())):
        params[path] = jnp.zeros(row.full_shape, jnp.float32)
        if path[-1] == "lora_a":
            bound = row.shape[0] ** -0.5
            params[path] = jax.random.uniform(
                jax.random.fold_in(key, number), row.full_shape, jnp.float32, -bound, bound
            )
    return traverse_util.unflatten_dict(params)


def join_adapters(base: dict, adapters: dict) -> dict:
    """One tree of both, which the decoder and its heads take as any other. Nothing is copied."""
    joined = dict(base)
    for name, value in adapters.items():
        joined[name] = (
            join_adapters(base[name], value) if isinstance(base.get(name), dict) else value
        )
    return joined


def merge_kernel(kernel, lora_a, lora_b, scale: float):
    """The kernel with its adapters in it, float32."""
    product = jnp.matmul(
        lora_a.astype(jnp.float32), lora_b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return kernel.astype(jnp.float32) + scale * product
