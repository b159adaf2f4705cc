"""Memory of the output embedding and its logits by arithmetic."""

from jax.sharding import Mesh

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory.plan_inputs import FLOAT32_BYTES, AbstractStep, Role
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.runtime import meshes
from jax_ppo.runtime.parallelism.vocabulary import TPU_LANES


def weight_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of the output embedding in the type of the computation."""
    mesh = step.programs.mesh
    elements = num_elements(role, mesh)
    # For GPUs trained weights are gathered as they are stored, in float32, and then rounded. For
    # TPUs they are rounded first.
    is_wide = role.stored_itemsize > role.itemsize
    if meshes.gathers_weights(mesh) and is_wide and target_platform() != "tpu":
        return elements * (role.itemsize + FLOAT32_BYTES)
    return elements * role.itemsize


def exchanged_gradient_bytes(role: Role, mesh: Mesh) -> int:
    """Return the bytes that a device receives of the gradient of its output embedding's columns.

    0 if the exchange is a reduce-scatter, which adds up what it receives.
    """
    columns = role.architecture.hidden_size // meshes.weight_shards(mesh)
    is_scattered = target_platform() != "tpu" or columns % TPU_LANES == 0
    if is_scattered or not meshes.gathers_weights(mesh):
        return 0
    return num_elements(role, mesh) * role.stored_itemsize


def num_elements(role: Role, mesh: Mesh) -> int:
    """Return a device's number of elements of the gathered output embedding."""
    architecture = role.architecture
    assert not isinstance(architecture, DebertaArchitecture), "encoders have no logits"
    return architecture.vocab_size * architecture.hidden_size // int(mesh.shape["model"])


def chunk_bytes(role: Role, tokens: int, parts: int) -> int:
    """Return the bytes of a chunk of the logits of `tokens`, in float32."""
    architecture = role.architecture
    assert not isinstance(architecture, DebertaArchitecture), "encoders have no logits"
    chunk = vocabulary_chunks.default_chunk_size(architecture.vocab_size, target_platform())
    return min(chunk, tokens) * architecture.vocab_size * FLOAT32_BYTES // parts
