"""Memory of a model's layers by arithmetic: activations, attention's scores, gathered weights."""

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory.experts_memory import multiplied_elements, tokens_at_experts
from jax_ppo.memory.pipeline_memory import schedule_rows
from jax_ppo.memory.plan_inputs import FLOAT32_BYTES, AbstractStep, Role
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import query_block_size
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.runtime.device_memory import bytes_per_device


def forward_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the current layer of a forward pass over [R, L] needs."""
    return (
        output_bytes(role, _layer_tokens(step, role, shape), step.programs.mesh)
        + gathered_bytes(step, role)
        + _pipeline_bytes(step, role, shape)
        + _row_bytes(step, role, shape)
        + _pair_bytes(step, role, shape)
    )


def backward_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the current layer of a backward pass over [R, L] needs."""
    outputs = output_bytes(role, _layer_tokens(step, role, shape), step.programs.mesh)
    # Hidden states between stages, keys and values of whole rows, each with their gradients.
    hidden_states = 2 * _pipeline_bytes(step, role, shape)
    rows = 2 * _row_bytes(step, role, shape)
    pairs = _pair_bytes(step, role, shape, with_gradient=True)
    return outputs * 3 // 2 + gathered_bytes(step, role) + hidden_states + rows + pairs


def output_bytes(role: Role, tokens: int, mesh: Mesh, score_bytes: int = 0) -> int:
    """Return the bytes of the outputs of a layer's products for `tokens`.

    Args:
      role: the model.
      tokens: number of tokens on a device.
      mesh: the mesh that the layer runs on.
      score_bytes: bytes of the scores of attention, which are freed before the MLP begins.
    """
    architecture = role.architecture
    parts = mesh.shape["model"]
    width = 4 * architecture.hidden_size
    mlp = 3 * architecture.intermediate_size // parts
    if not isinstance(architecture, DebertaArchitecture):
        heads = (2 * architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim
        width += heads // parts
        # Each expert of a token has its own copy of it, and its own output.
        copies = tokens_at_experts(architecture, mesh)
        width += 2 * copies * architecture.experts_per_token * architecture.hidden_size
        # A gated MLP has gate, up and their product; an ungated one has the input and the output of
        # its activation.
        mlp = copies * len(architecture.mlp_projections) * architecture.active_width // parts
    # The steps of a gelu are in float32; those of a silu are fused into the products.
    mlp_itemsize = FLOAT32_BYTES
    if getattr(architecture, "activation", "") == "silu":
        mlp_itemsize = role.itemsize
    return tokens * width * role.itemsize + max(tokens * mlp * mlp_itemsize, score_bytes)


def num_scores(architecture: Architecture, rows: int, block: int, keys: int, parts: int) -> int:
    """Return the number of scores that xla's attention has at once, of a block of queries."""
    heads = -(-architecture.num_heads // parts)
    return rows * heads * min(block, keys) * keys


def saved_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the forward pass over [R, L] keeps of a layer for the backward pass."""
    net = role.net
    architecture = role.architecture
    assert isinstance(net, Transformer), "encoders are not trained"
    assert not isinstance(architecture, DebertaArchitecture)
    mesh = step.programs.mesh
    parts = mesh.shape["model"]
    tokens = device_tokens(step, shape)
    scores = 0
    if net.attention == "xla":
        scores = _kept_scores(architecture, tokens, shape[-1], mesh)
    if not net.remat:
        return output_bytes(role, tokens, mesh) + scores * (FLOAT32_BYTES + role.itemsize)
    # The input of the layer, and what the policy keeps (transformer.REMAT_POLICIES).
    width = architecture.hidden_size
    queries = architecture.num_heads * architecture.head_dim // parts
    if net.remat_policy == "attention":
        width += queries
    if net.remat_policy != "dots":
        return tokens * width * role.itemsize
    # The products that the backward pass reads: queries, keys, values, the output of attention
    # before and, with xla, also without its projection, and the inputs of the activation. Those of
    # experts (`ragged_dot`) are computed again.
    width += queries + 2 * architecture.num_kv_heads * architecture.head_dim // parts
    width += architecture.hidden_size
    if net.attention == "xla":
        width += queries
    if not architecture.num_experts:
        inputs = len(architecture.mlp_projections) - 1
        width += inputs * architecture.intermediate_size // parts
    return tokens * width * role.itemsize + scores * FLOAT32_BYTES


def gathered_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of gathered layers; compilers gather and round them in different orders."""
    if not meshes.gathers_weights(step.programs.mesh):
        return 0
    mesh = step.programs.mesh
    layers = multiplied_elements(role.params["layers"], mesh)
    elements = layers // role.architecture.num_layers // mesh.shape["model"]
    # For TPUs a layer is rounded first, and each of its matrices arrives, or its gradient leaves,
    # while it is multiplied: there is never more than one layer, even in the backward pass.
    if target_platform() == "tpu":
        return elements * role.itemsize
    # For GPUs the current layer and the next are gathered in float32.
    return 2 * elements * role.stored_itemsize


def cast_weight_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of weights that are converted from float32 to the type of the computation.

    The compiler for TPUs converts a device's part of all layers before the first one is gathered or
    runs.
    """
    if target_platform() != "tpu" or role.itemsize == FLOAT32_BYTES:
        return 0
    wide = [x for x in jax.tree.leaves(role.params) if x.dtype.itemsize == FLOAT32_BYTES]
    return bytes_per_device(wide) * role.itemsize // FLOAT32_BYTES


def device_tokens(step: AbstractStep, shape: tuple[int, ...]) -> int:
    """Return a device's number of tokens in a micro-batch of [R, L]."""
    return int(np.prod(shape)) // meshes.row_shards(step.programs.mesh)


def _pair_bytes(
    step: AbstractStep, role: Role, shape: tuple[int, ...], with_gradient: bool = False
) -> int:
    """Return the bytes of attention's arrays with an entry for each pair of a query and a key.

    cuDNN reads a mask in the type of the computation, the same for all heads and for gradients. xla
    has scores in float32 and weights in the type of the computation, of each head for a block of
    queries at once; with gradients there are four arrays in float32. Splash has none of these.
    """
    mesh = step.programs.mesh
    net = role.net
    if not isinstance(net, Transformer) or net.attention == "splash":
        return 0
    queries = shape[-1]
    row_parts = meshes.row_parts(mesh)
    rows = _layer_tokens(step, role, shape) // queries
    keys = queries * row_parts
    if net.attention == "cudnn":
        return rows * queries * keys * role.itemsize
    block = queries // 2
    if row_parts == 1:
        block = query_block_size(queries)
    scores = num_scores(net.architecture, rows, block, keys, mesh.shape["model"])
    if with_gradient:
        return 4 * scores * FLOAT32_BYTES
    return scores * (FLOAT32_BYTES + role.itemsize)


def _kept_scores(architecture: Architecture, tokens: int, queries: int, mesh: Mesh) -> int:
    """Return the number of scores of all blocks of queries of xla's attention.

    Args:
      architecture: the model's architecture.
      tokens: number of a device's tokens.
      queries: number of a device's tokens of one row.
      mesh: the run's mesh.
    """
    row_parts = meshes.row_parts(mesh)
    block = query_block_size(queries)
    # The keys of a block end with its last query.
    starts = range(0, queries, block)
    pairs = sum(min(block, queries - start) * min(start + block, queries) for start in starts)
    if row_parts > 1:
        # Two blocks: half of the row, and all of it.
        pairs = queries // 2 * (queries * row_parts * 3 // 2)
    heads = -(-architecture.num_heads // mesh.shape["model"])
    return tokens // queries * heads * pairs


def _row_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes of the keys and values of whole rows, if devices hold parts of them."""
    mesh = step.programs.mesh
    architecture = role.architecture
    row_parts = meshes.row_parts(mesh)
    if row_parts == 1 or isinstance(architecture, DebertaArchitecture):
        return 0
    # If there are fewer key heads than devices that split them, each device has a copy.
    heads = max(architecture.num_kv_heads // int(mesh.shape["model"]), 1)
    tokens = device_tokens(step, shape) * row_parts
    return 2 * tokens * heads * architecture.head_dim * role.itemsize


def _pipeline_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes of the hidden states that enter and leave a stage, of rows [R, L]."""
    schedule = schedule_rows(step.programs.mesh, shape[0])
    if schedule.stages == 1 or isinstance(role.architecture, DebertaArchitecture):
        return 0
    # Gathered rows, the input of each tick and its output.
    hidden_rows = schedule.micro_batches + 2 * schedule.ticks
    return hidden_rows * shape[-1] * role.architecture.hidden_size * role.itemsize


def _layer_tokens(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the number of tokens of a micro-batch [R, L] that a device's layer processes at once.

    In stages these are the tokens of one row.
    """
    is_encoder = isinstance(role.architecture, DebertaArchitecture)
    if step.programs.mesh.shape["stage"] == 1 or is_encoder:
        return device_tokens(step, shape)
    return shape[-1]
