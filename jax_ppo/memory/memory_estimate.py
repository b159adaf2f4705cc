"""An estimate of the memory of each program of a step, for machines without their compiler.

Parameters, optimizer states, gradients and caches have their exact sizes. Activations and logits
are estimated, for decoders of attention and a gated MLP; for these the peak is within 15 % of the
compilers' (docs/development/memory-estimate.md). Further arrays of other architectures are not
counted.
"""

import dataclasses
import math

import jax

from jax_ppo.kernels.platform import target_platform
from jax_ppo.kernels.vocabulary_chunks import default_chunk_size
from jax_ppo.memory.abstract_step import FLOAT32_BYTES, AbstractStep, Role
from jax_ppo.memory.memory_check import fetched_memory
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import query_block_size
from jax_ppo.models.attention_kernels import program_for_length
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.ppo.programs import StepProgram, planned_programs
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.runtime.parallelism.vocabulary import TPU_LANES
from jax_ppo.sampler.slots import PREFILL_TOKENS
from jax_ppo.types import Packing


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes per device while a program runs; the fields add up to its peak."""

    parameters: int = 0  # trained parameters of actor and critic
    optimizer: int = 0  # their optimizer states
    gradients: int = 0  # the sum of gradients over micro-batches
    frozen: int = 0  # parameters of reference and reward model
    decoding_copy: int = 0  # the copy of the weights that sampling reads
    cache: int = 0  # keys and values of the slots, and of the prompts in the prefill buffer
    batch: int = 0  # prompts, rollout, scores and packing, as arguments and results
    process: int = 0  # interpreter, libraries and programs, if the device is the only CPU
    temporaries: int = 0  # everything else: activations, logits, a micro-batch's gradients

    @property
    def peak(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())


# Measured with 30 layers (docs/development/memory-estimate.md): 0.3 GiB when weights are loaded,
# the rest for compiled programs and malloc's own. torch, if transformers loads it, adds 0.24.
PROCESS_BYTES = 7 * 2**30 // 10


def resident_memory(step: AbstractStep, program: StepProgram) -> ProgramMemory:
    """Return the bytes of arrays of known shapes in a program."""
    least = step.least
    fetched = fetched_memory(program, step.step_options, step.state)
    decodes = program.kind == "sampling"
    if decodes and step.is_separate:
        return ProgramMemory(decoding_copy=least.separate, cache=step.cache_bytes)
    gradients = 0
    if program.kind == "update":
        gradients = bytes_per_device(step.role(program.role).trained)
    return ProgramMemory(
        parameters=least.parameters + fetched["parameters"],
        optimizer=least.optimizer + fetched["optimizer"],
        frozen=least.frozen + fetched["frozen"],
        gradients=gradients,
        decoding_copy=least.decoding if decodes or program.kind == "resharding" else 0,
        cache=step.cache_bytes if decodes else 0,
        process=PROCESS_BYTES if target_platform() == "cpu" and step.mesh.size == 1 else 0,
    )


def estimate_memory(step: AbstractStep) -> dict[str, ProgramMemory]:
    """Return the bytes per device of each program of a step, by its name."""
    packed = step.packed
    batch = bytes_per_device((step.prompts, packed.forward, packed.mini_batches))
    return {
        program.name: dataclasses.replace(
            resident_memory(step, program),
            batch=batch,
            temporaries=_estimate_temporaries(step, program),
        )
        for program in planned_programs(step)
    }


def _estimate_temporaries(step: AbstractStep, program: StepProgram) -> int:
    match program.kind:
        case "sampling":
            return _sampling_bytes(step)
        case "forward pass":
            return _forward_bytes(step, program.role, step.packed.forward[0])
        case "update":
            packing = step.packed.mini_batches[program.role].packing
            # A loss may run frozen policies on the same rows.
            others = program.forwards(step.step_options)
            return _update_bytes(step, program.role, packing) + sum(
                _forward_bytes(step, name, packing) for name in others
            )
    return 0


def _sampling_bytes(step: AbstractStep) -> int:
    """Return the bytes of a prefill, of two copies of the logits of all slots, and of padding."""
    role, mesh = step.role("actor"), step.rollout_mesh
    length = step.prompts.tokens.shape[1]
    prompts = max(1, min(PREFILL_TOKENS // length, step.queue // step.sampling.n))
    scores = prompts * _scores_per_row(role, length, mesh.shape["model"])
    logits = 2 * step.slots * role.architecture.vocab_size // mesh.shape["model"] * FLOAT32_BYTES
    prefill = prompts * length * _layer_width(role, mesh.shape["model"]) * role.itemsize
    padding = 0
    if target_platform() == "tpu":
        # Heads narrower than a lane take as much memory as wide ones.
        heads = [each for each in role.architecture.cache_heads if each is not None]
        added = sum(number * (-width % TPU_LANES) for number, width in heads)
        padding = step.cache_bytes * added // sum(map(math.prod, heads))
    return padding + prefill + scores * (FLOAT32_BYTES + role.itemsize) + logits


def _forward_bytes(step: AbstractStep, name: str, packing: Packing) -> int:
    """Return the bytes of a layer and of a chunk of logits in a pass over a micro-batch."""
    role = step.role(name)
    tokens, scores = _tokens_and_scores(step, role, packing)
    layer = tokens * _layer_width(role, step.mesh.shape["model"]) * role.itemsize
    layer += scores * (FLOAT32_BYTES + role.itemsize)
    head = _logit_chunk_bytes(step, role, tokens) + _head_bytes(step, role)
    return _cast_bytes(role) + _join(step, layer + _gathered_layer_bytes(step, role), head)


def _update_bytes(step: AbstractStep, name: str, packing: Packing) -> int:
    """Return the bytes of a pass over a micro-batch and back, besides the sum of gradients."""
    role, parts = step.role(name), step.mesh.shape["model"]
    tokens, scores = _tokens_and_scores(step, role, packing)
    width = _layer_width(role, parts)
    # The backward pass has the gradients of outputs beside them, and four arrays of scores.
    layer = 3 * tokens * width * role.itemsize // 2 + 4 * scores * FLOAT32_BYTES
    # Of each layer, the forward pass keeps its input, or what the policy of checkpointing says.
    kept = tokens * role.architecture.hidden_size * role.itemsize
    if not role.net.remat or role.net.remat_policy == "dots":
        blocks = -(-packing.sample.shape[-1] // query_block_size(packing.sample.shape[-1]))
        # Norms and activations are computed in float32; accelerators keep products and attention.
        kept_per_token = width * FLOAT32_BYTES
        if role.net.remat or target_platform() != "cpu":
            heads, mlp = _split_widths(role.architecture)
            attended = 0 if role.net.remat else role.architecture.hidden_size
            products = 3 * role.architecture.hidden_size + (heads + 2 * mlp + attended) // parts
            kept_per_token = products * role.itemsize
        # A causal mask hides half of the scores of all blocks of queries.
        kept = tokens * kept_per_token + scores * (blocks + 1) // 2 * FLOAT32_BYTES
    elif role.net.remat_policy == "attention":
        kept += kept // parts
    gradients = bytes_per_device(role.trained["layers"])
    fixed = _cast_bytes(role) + role.architecture.num_layers * kept
    head = 3 * _logit_chunk_bytes(step, role, tokens) // 2
    if role.has_logits and role.net.lora is None:
        # The whole output embedding has a gradient in float32.
        head += _head_elements(step, role) * FLOAT32_BYTES
    if target_platform() == "cpu":
        # Its compiler scales the whole gradient into a copy, and has two new arrays of a parameter.
        sizes = [bytes_per_device(x) for x in jax.tree.leaves(role.trained)]
        fixed += sum(sizes) + 2 * max(sizes)
    backward = gradients + layer + _gathered_layer_bytes(step, role)
    return fixed + _join(step, backward, head + _head_bytes(step, role))


def _tokens_and_scores(step: AbstractStep, role: Role, packing: Packing) -> tuple[int, int]:
    """Return how many tokens of a micro-batch a device has, and scores of attention at once."""
    rows, length = packing.sample.shape[-2:]
    parts, shards = meshes.row_parts(step.mesh), meshes.row_shards(step.mesh)
    rows *= parts
    scores = _scores_per_row(role, length * parts, step.mesh.shape["model"])
    return rows * length // shards, max(1, rows // shards) * scores


def _join(step: AbstractStep, layers: int, head: int) -> int:
    """Return the memory of layers and head in turn; the head's weights arrive while layers run."""
    return layers + head if meshes.gathers_weights(step.mesh) else max(layers, head)


def _layer_width(role: Role, parts: int) -> int:
    """Return how many numbers per token the inputs and outputs of a layer's products have."""
    a = role.architecture
    if isinstance(a, DebertaArchitecture):
        return 8 * a.hidden_size + 3 * a.intermediate_size // parts
    heads, mlp = _split_widths(a)
    return 4 * a.hidden_size + (2 * heads + 3 * mlp) // parts


def _split_widths(a: Architecture) -> tuple[int, int]:
    """Return the widths that `model` splits: of queries with keys, and of the MLP."""
    heads = max((a.num_heads + number) * width for number, width in a.attended_heads)
    return heads, max(a.active_width, a.dense_size)


def _scores_per_row(role: Role, length: int, parts: int) -> int:
    """Return the number of scores that attention has at once: xla's, of a block of queries."""
    if program_for_length(getattr(role.net, "attention", "xla"), length) != "xla":
        return 0
    heads = -(-role.architecture.num_heads // parts)
    return heads * min(query_block_size(length), length) * length


def _logit_chunk_bytes(step: AbstractStep, role: Role, tokens: int) -> int:
    if not role.has_logits:
        return 0
    size = role.architecture.vocab_size
    positions = min(default_chunk_size(size), tokens)
    return positions * size * FLOAT32_BYTES // step.mesh.shape["model"]


def _head_elements(step: AbstractStep, role: Role) -> int:
    a = role.architecture
    return a.vocab_size * a.hidden_size // step.mesh.shape["model"] if role.has_logits else 0


def _head_bytes(step: AbstractStep, role: Role) -> int:
    itemsize = role.itemsize
    # GPUs gather the head's weights as they are stored, and then round them.
    if meshes.gathers_weights(step.mesh) and target_platform() != "tpu":
        stored = role.params["embed"]["embedding"].dtype.itemsize
        itemsize += stored * (stored > itemsize)
    return _head_elements(step, role) * itemsize


def _gathered_layer_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of gathered layers: the current one, on GPUs also the next."""
    if not meshes.gathers_weights(step.mesh):
        return 0
    layers = sum(x.size for x in jax.tree.leaves(role.params["layers"]))
    elements = layers // role.architecture.num_layers // step.mesh.shape["model"]
    return elements * role.itemsize * (1 if target_platform() == "tpu" else 2)


def _cast_bytes(role: Role) -> int:
    """Return the bytes of weights that a TPU rounds before the first layer runs."""
    if target_platform() != "tpu" or role.itemsize == FLOAT32_BYTES:
        return 0
    wide = [x for x in jax.tree.leaves(role.params) if x.dtype.itemsize == FLOAT32_BYTES]
    return bytes_per_device(wide) * role.itemsize // FLOAT32_BYTES
