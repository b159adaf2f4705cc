"""Effects of dividing experts among devices (`mesh.expert`) on work and memory of a pass.

Kernels of experts are not gathered over `expert`; all other parameters are, as over `fsdp`.
"""

import math

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_ppo.models.architecture import Architecture
from jax_ppo.runtime import meshes
from jax_ppo.types import Params


def multiplied_elements(params: Params, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parameters that the devices along `model` multiply with together."""
    others, experts = _count_elements(params)
    return others + experts // mesh.shape["expert"]


def received_share(params: Params, mesh: Mesh | AbstractMesh) -> float:
    """Return the share of `multiplied_elements` that other devices store, 0..1."""
    others, experts = _count_elements(params)
    own_experts = experts / mesh.shape["expert"]
    stored = others / meshes.weight_shards(mesh)
    stored += own_experts / math.prod(mesh.shape[axis] for axis in meshes.EXPERT_WEIGHTS)
    return 1 - stored / (others + own_experts)


def exchanged_bytes(
    architecture: Architecture, tokens: float, itemsize: int, mesh: Mesh | AbstractMesh
) -> float:
    """Return the bytes of hidden states that a device receives for its experts, and of their sums.

    Args:
      architecture: the model's architecture.
      tokens: number of the device's own tokens.
      itemsize: bytes of a number of the computation.
      mesh: the mesh of the pass.
    """
    if not architecture.num_experts:
        return 0.0
    other_devices = mesh.shape["expert"] - 1
    return (
        architecture.num_layers * 2 * other_devices * tokens * architecture.hidden_size * itemsize
    )


def tokens_at_experts(architecture: Architecture, mesh: Mesh | AbstractMesh) -> int:
    """Return the maximum number of tokens that a device's experts get, per token of its own.

    Any token of the devices along `expert` may select any expert.
    """
    if not architecture.num_experts:
        return 1
    return mesh.shape["expert"]


def _count_elements(params: Params) -> tuple[int, int]:
    """Return the number of parameters outside of experts, and of experts."""
    experts = 0
    total = 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        total += x.size
        if "experts" in jax.tree_util.keystr(path, simple=True, separator="/").split("/"):
            experts += x.size
    return total - experts, experts
