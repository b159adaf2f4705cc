"""Memory of each phase by formulas: exact shapes of arrays, and estimated temporaries."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.kernels.delta_rule import CHUNK
from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory.abstract_step import FLOAT32_BYTES, AbstractStep, Role
from jax_ppo.memory.memory_check import fetched_memory
from jax_ppo.memory.step_work import (
    multiplied_elements,
    schedule_pass,
    tokens_at_experts,
    whole_read_params,
)
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import (
    CUDNN_TILE,
    blocks_of_queries,
    cudnn_block_size,
    query_block_size,
)
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.programs import StepProgram, find_step_program, planned_programs
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.runtime.parallelism.vocabulary import TPU_LANES
from jax_ppo.sampler.next_token import constrains_logits
from jax_ppo.sampler.slots import PREFILL_TOKENS, kept_tokens_width, record_bytes
from jax_ppo.training.stochastic_rounding import gradient_shapes
from jax_ppo.types import MiniBatches, Packing


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Bytes per device in one phase of a step; the fields add up to its peak."""

    parameters: int = 0  # trained parameters of actor and critic
    optimizer: int = 0  # their optimizer states
    gradients: int = 0  # the sum of gradients over micro-batches
    frozen: int = 0  # parameters of reference and reward model
    decoding_copy: int = 0  # the copy of the weights that sampling reads
    cache: int = 0  # keys and values of the slots, and of the prompts in the prefill buffer
    batch: int = 0  # prompts, rollout, scores and packing, as arguments and results
    process: int = 0  # interpreter, libraries and programs, if the device is the only CPU
    temporaries: int = 0  # everything else

    @property
    def peak(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())


# Measured with 30 layers (docs/scaling.md): 0.3 GiB when weights are loaded, the rest for compiled
# programs and what malloc keeps. Where transformers finds torch and loads it, it takes 0.24 more.
PROCESS_BYTES = 7 * 2**30 // 10
# Arrays of a chunk's pairs of tokens that a Gated DeltaNet has at once: decays, the system, its
# inverse and the products of queries and keys.
_DELTA_PAIRS = 4


def resident_memory(step: AbstractStep, name: str) -> PhaseMemory:
    """Return the bytes of arrays of known shapes in a phase; `name` is its program's.

    The sums of weights are computed as at the start of a run (`PPOMemory.measure`).
    """
    least, program = step.least, find_step_program(name)
    fetched = fetched_memory(program, step.step_options, step.state)
    decodes = program.kind == "sampling"
    if decodes and step.is_separate:
        return PhaseMemory(decoding_copy=least.separate, cache=step.cache_bytes)
    gradients = 0
    if program.kind == "update":
        gradients = bytes_per_device(step.role(program.role).trained)
    return PhaseMemory(
        parameters=least.parameters + fetched["parameters"],
        optimizer=least.optimizer + fetched["optimizer"],
        frozen=least.frozen + fetched["frozen"],
        gradients=gradients,
        decoding_copy=least.decoding if decodes or program.kind == "resharding" else 0,
        cache=step.cache_bytes if decodes else 0,
        # The memory of a single CPU is that of the process.
        process=PROCESS_BYTES if target_platform() == "cpu" and step.mesh.size == 1 else 0,
    )


def estimate_phases(step: AbstractStep) -> dict[str, PhaseMemory]:
    """Return the bytes per device in each phase of a step, by the name of its program."""
    packed = step.packed
    batch = bytes_per_device((step.prompts, packed.forward, packed.mini_batches))
    if packed.whole is not packed.forward:
        batch += bytes_per_device(packed.whole)
    # Routed experts and kept tokens; during sampling the step before has a record, too.
    record = record_bytes(
        step.nets.actor.architecture,
        step.sampling,
        samples=step.samples // meshes.row_shards(step.mesh),
        prompt_length=step.prompts.tokens.shape[1],
    )
    return {
        program.name: dataclasses.replace(
            resident_memory(step, program.name),
            batch=batch + record * (2 if program.kind == "sampling" else 1),
            temporaries=_estimate_temporaries(step, program),
        )
        for program in planned_programs(step)
    }


def _estimate_temporaries(step: AbstractStep, program: StepProgram) -> int:
    match program.kind:
        case "resharding":
            return _resharding_temporaries(step)
        case "sampling":
            return _sampling_temporaries(step)
        case "forward pass":
            rows, _ = step.packed.read_by(program.role)
            return _forward_temporaries(step, step.role(program.role), rows)
        case "update":
            role = step.role(program.role)
            batches = step.packed.mini_batches[program.role]
            others = [step.role(name) for name in program.reads(step.step_options)]
            return _update_temporaries(step, role, batches) + sum(
                _other_policy_temporaries(step, other, batches) for other in others
            )
        case "elementwise":
            return 0


def _gathered_kept_bytes(step: AbstractStep, tokens: int) -> int:
    """Return the bytes of the record of kept tokens of a micro-batch of this many tokens."""
    if not step.sampling.returns_kept_tokens:
        return 0
    return tokens * kept_tokens_width(step.nets.actor.architecture.vocab_size)


def _resharding_temporaries(step: AbstractStep) -> int:
    """Return the bytes, besides the result, that laying out weights for decoding takes."""
    if target_platform() != "tpu" or not meshes.gathers_weights(step.mesh):
        return 0
    # Layers are laid out one after another. The compiler for TPUs holds a second copy of an
    # embedding, which it transposes, and three copies if devices also divide the result.
    tables = [x for name, x in step.decoding_weights.items() if not name.startswith("layer_")]
    table = max(bytes_per_device(x) for x in tables)
    is_divided = step.rollout_mesh != step.mesh and not step.is_separate
    return 3 * table if is_divided else table


def _sampling_temporaries(step: AbstractStep) -> int:
    """Return the bytes of a prefill and of the logits of all slots."""
    role = step.role("actor")
    architecture = role.architecture
    mesh = step.rollout_mesh
    parts = mesh.shape["model"]
    prompt = step.prompts.tokens.shape[1]
    prompts = max(1, min(PREFILL_TOKENS // prompt, step.queue // step.sampling.n))
    scores = num_scores(architecture, prompts, query_block_size(prompt), prompt, parts)
    score_bytes = scores * (FLOAT32_BYTES + role.itemsize)
    prefill = output_bytes(role, prompts * prompt, mesh, score_bytes=score_bytes)
    prefill += _per_layer_bytes(role, prompts * prompt)
    arrays = 3 if constrains_logits(step.sampling) else 2
    logits = arrays * step.slots * architecture.vocab_size // parts * FLOAT32_BYTES
    padding = 0
    if target_platform() == "tpu":
        # Heads narrower than a lane take as much memory as wide ones.
        heads = [own for own in architecture.cache_heads if own is not None]
        added = sum(number * (-width % TPU_LANES) for number, width in heads)
        padding = step.cache_bytes * added // sum(map(math.prod, heads))
    return padding + prefill + logits


def _forward_temporaries(step: AbstractStep, role: Role, packing: Packing) -> int:
    """Return the bytes that a forward pass over a micro-batch needs."""
    shape = _rows_at_once(packing)
    tokens = device_tokens(step, shape)
    layers = forward_bytes(step, role, shape)
    head = 0
    if role.has_logits:
        head = logit_chunk_bytes(role, tokens, step.mesh.shape["model"])
        head += head_weight_bytes(step, role) + _gathered_kept_bytes(step, tokens)
    return cast_weight_bytes(role) + _join(step, layers, head)


def _update_temporaries(step: AbstractStep, role: Role, batches: MiniBatches) -> int:
    """Return the bytes that an optimizer step needs besides the sum of gradients."""
    mesh = step.mesh
    shape = _rows_at_once(batches.packing)
    tokens = device_tokens(step, shape)
    schedule = schedule_pass(step, role, shape[0])
    # Stages have the gradients of a micro-batch and of a tick.
    gradients = bytes_per_device(role.trained["layers"]) * min(schedule.stages, 2)
    # In stages, for a device's part of the layers in each tick.
    saved_per_layer = round(saved_bytes(step, role, shape) * schedule.slowdown)
    layers = backward_bytes(step, role, shape)
    head = gathered_head = 0
    if role.has_logits:
        head = logit_chunk_bytes(role, tokens, mesh.shape["model"]) * 3 // 2
        gathered_head = head_weight_bytes(step, role) + _gathered_kept_bytes(step, tokens)
        # The whole output embedding has a gradient in float32, unless only adapters are trained.
        if role.net.lora is None:
            exchanged = _exchanged_gradient_bytes(role, mesh)
            head = max(head, exchanged) + _num_head_elements(role, mesh) * FLOAT32_BYTES
    fixed = cast_weight_bytes(role) + role.architecture.num_layers * saved_per_layer
    # Further embeddings and their gradients, and the gradient of the whole table.
    fixed += 2 * _per_layer_bytes(role, tokens)
    fixed += bytes_per_device(role.trained.get("embed_per_layer", {}))
    if replicas := batches.packing.replicas:
        # A sum for each level of the tree that is on a device.
        levels = (replicas // mesh.size).bit_length() - 1
        fixed += levels * bytes_per_device(role.trained)
    if target_platform() == "tpu":
        optim = step.step_options.update.actor.optim
        trains_head = role.has_logits and role.net.lora is None
        exchanged = _exchanged_gradient_bytes(role, mesh)
        is_exchanged_once = meshes.gathers_weights(mesh) and not exchanged
        if trains_head and optim.gradient_dtype == "float32" and is_exchanged_once:
            # Each device has a whole sum of the output embedding's gradients: devices add theirs
            # up once per mini-batch.
            fixed += _num_head_elements(role, mesh) * FLOAT32_BYTES
        # The layers' gradients follow the head's; of the head, only the weights remain.
        return fixed + gathered_head + max(gradients + layers, head)
    backward = fixed + gradients + _join(step, layers, head + gathered_head)
    if target_platform() == "cpu":
        return max(backward, _optimizer_temporaries(role))
    return backward


def _other_policy_temporaries(step: AbstractStep, other: Role, batches: MiniBatches) -> int:
    """Return the bytes of a frozen policy's pass over a micro-batch, to which a loss has a KL."""
    shape = _rows_at_once(batches.packing)
    # Its hidden states stay until the backward pass over the vocabulary.
    hidden = device_tokens(step, shape) * other.architecture.hidden_size * other.itemsize
    return hidden + forward_bytes(step, other, shape) + head_weight_bytes(step, other)


def _optimizer_temporaries(role: Role) -> int:
    """Return the bytes of an optimizer step by the compiler for CPUs, which fuses less of it.

    It scales the whole gradient into a copy, and has two new arrays of a parameter at once.
    """
    sizes = [bytes_per_device(x) for x in jax.tree.leaves(gradient_shapes(role.trained, "float32"))]
    return sum(sizes) + 2 * max(sizes)


def _join(step: AbstractStep, layers: int, head: int) -> int:
    """Return the memory of layers and head, which run one after the other.

    Gathered weights of the head arrive while the layers run, so that both are in memory.
    """
    return layers + head if meshes.gathers_weights(step.mesh) else max(layers, head)


def forward_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the current layer of a forward pass over [R, L] needs."""
    return (
        output_bytes(role, _layer_tokens(step, role, shape), step.mesh)
        + gathered_bytes(step, role)
        + _pipeline_bytes(step, role, shape)
        + _row_bytes(step, role, shape)
        + _pair_bytes(step, role, shape)
        + _per_layer_bytes(role, device_tokens(step, shape))
    )


def _per_layer_bytes(role: Role, tokens: int) -> int:
    """Return the bytes of the further embeddings of all layers."""
    if isinstance(role.architecture, DebertaArchitecture):
        return 0
    return tokens * role.architecture.num_layers * role.architecture.per_layer_size * role.itemsize


def backward_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the current layer of a backward pass over [R, L] needs."""
    outputs = output_bytes(role, _layer_tokens(step, role, shape), step.mesh)
    # Hidden states between stages, keys and values of whole rows, each with their gradients.
    hidden_states = 2 * _pipeline_bytes(step, role, shape)
    rows = 2 * _row_bytes(step, role, shape)
    pairs = _pair_bytes(step, role, shape, with_gradient=True)
    return outputs * 3 // 2 + gathered_bytes(step, role) + hidden_states + rows + pairs


def output_bytes(role: Role, tokens: int, mesh: Mesh, score_bytes: int = 0) -> int:
    """Return the bytes of the outputs of a layer's products for `tokens`.

    `score_bytes` is the size of attention's scores, which are freed before the MLP begins.
    """
    architecture = role.architecture
    parts = mesh.shape["model"]
    width = 4 * architecture.hidden_size
    mlp = 3 * architecture.intermediate_size // parts
    if not isinstance(architecture, DebertaArchitecture):
        heads = architecture.attended_heads
        width += 2 * max((architecture.num_heads + n) * size for n, size in heads) // parts
        width += architecture.latent_width + 2 * architecture.per_layer_size
        if any(architecture.linear_layers):
            # In float32, before and after the convolution, and by chunks, whose products of tokens
            # are pairs of each with all.
            pairs = _DELTA_PAIRS * CHUNK * architecture.delta_value_heads
            channels = sum(architecture.delta_widths) or architecture.hidden_size
            numbers = (3 * channels + pairs) // parts
            width += numbers * FLOAT32_BYTES // role.itemsize
        # Each expert of a token has its own copy of it, and its own output.
        copies = tokens_at_experts(architecture, mesh)
        width += 2 * copies * architecture.experts_per_token * architecture.hidden_size
        # A gated MLP has gate, up and their product; an ungated one has the input and the output of
        # its activation.
        widest = max(copies * architecture.active_width, architecture.dense_size)
        mlp = len(architecture.mlp_projections) * widest // parts
    # The steps of a gelu are in float32; the steps of a silu are fused into the products.
    is_fused = getattr(architecture, "activation", "") == "silu"
    mlp_itemsize = role.itemsize if is_fused else FLOAT32_BYTES
    return tokens * width * role.itemsize + max(tokens * mlp * mlp_itemsize, score_bytes)


def num_scores(architecture: Architecture, rows: int, block: int, keys: int, parts: int) -> int:
    """Return the number of scores that xla's attention has at once, of a block of queries."""
    heads = -(-architecture.num_heads // parts)
    return rows * heads * min(block, keys) * keys


def saved_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes that the forward pass over [R, L] keeps of a layer for the backward pass."""
    net, architecture, mesh = role.net, role.architecture, step.mesh
    parts = mesh.shape["model"]
    tokens = device_tokens(step, shape)
    scores = 0
    if net.attention == "xla":
        scores = _kept_scores(architecture, tokens, shape[-1], mesh)
    if not net.remat:
        return output_bytes(role, tokens, mesh) + scores * (FLOAT32_BYTES + role.itemsize)
    # The input of the layer, and what the policy keeps (transformer.REMAT_POLICIES).
    width = architecture.hidden_size
    heads = architecture.attended_heads
    queries = architecture.num_heads * sum(size for _, size in heads) // len(heads) // parts
    if net.remat_policy == "attention":
        width += queries
    if net.remat_policy != "dots":
        return tokens * width * role.itemsize
    # The products that the backward pass reads: queries, keys, values, the output of attention
    # before and, with xla, also without its projection, and the inputs of the activation. Those of
    # experts (`ragged_dot`) are computed again.
    width += queries + 2 * sum(map(math.prod, heads)) // len(heads) // parts
    width += architecture.hidden_size + architecture.latent_width
    if net.attention == "xla":
        width += queries
    mlp = sum(architecture.mlp_widths) // architecture.num_layers
    width += (len(architecture.mlp_projections) - 1) * mlp // parts
    return tokens * width * role.itemsize + scores * FLOAT32_BYTES


def gathered_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of gathered layers; compilers gather and round them in different orders."""
    if not meshes.gathers_weights(step.mesh):
        return 0
    mesh = step.mesh
    layers = multiplied_elements(role.params["layers"], mesh)
    elements = layers // role.architecture.num_layers // mesh.shape["model"]
    # For TPUs a layer is rounded first, and each of its matrices arrives, or its gradient leaves,
    # while it is multiplied: there is never more than one layer, even in the backward pass.
    if target_platform() == "tpu":
        return elements * role.itemsize
    # For GPUs the current layer and the next are gathered in float32.
    return 2 * elements * role.stored_itemsize


def cast_weight_bytes(role: Role) -> int:
    """Return the bytes of weights that are converted from float32 to the type of the computation.

    The compiler for TPUs converts a device's part of all layers before the first one is gathered or
    runs; rows of further embeddings are looked up before.
    """
    if target_platform() != "tpu" or role.itemsize == FLOAT32_BYTES:
        return 0
    params = whole_read_params(role.params)
    wide = [x for x in jax.tree.leaves(params) if x.dtype.itemsize == FLOAT32_BYTES]
    return bytes_per_device(wide) * role.itemsize // FLOAT32_BYTES


def _rows_at_once(packing: Packing) -> tuple[int, int]:
    """Return the shape [R, L] of the rows that the devices, or a virtual replica, run at once."""
    rows, length = packing.sample.shape[-2:]
    return rows // (packing.replicas or 1), length


def device_tokens(step: AbstractStep, shape: tuple[int, ...]) -> int:
    """Return a device's number of tokens in a micro-batch of [R, L]."""
    return int(np.prod(shape)) // meshes.row_shards(step.mesh)


def _pair_bytes(
    step: AbstractStep, role: Role, shape: tuple[int, ...], with_gradient: bool = False
) -> int:
    """Return the bytes of attention's arrays with an entry for each pair of a query and a key.

    They are of a block of queries. cuDNN reads a mask in the type of the computation, the same for
    all heads and for gradients. xla has scores in float32 and weights in the type of the
    computation, of each head; with gradients there are four arrays in float32. Splash has none of
    these.
    """
    mesh, net = step.mesh, role.net
    if not isinstance(net, Transformer) or net.attention == "splash":
        return 0
    queries = shape[-1]
    row_parts = meshes.row_parts(mesh)
    rows = _layer_tokens(step, role, shape) // queries
    keys = queries * row_parts
    if net.attention == "cudnn":
        block = queries // 2 if queries % 4 == 0 else queries  # as in attention_over_parts.py
        if row_parts == 1:
            size = cudnn_block_size(queries)
            blocks = blocks_of_queries(queries, size, None, None, tile=CUDNN_TILE)
            block = max(columns.stop - columns.start for columns, _ in blocks)
        return rows * block * keys * role.itemsize
    block = min(queries, query_block_size(queries)) if row_parts == 1 else queries // 2
    scores = num_scores(net.architecture, rows, block, keys, mesh.shape["model"])
    if with_gradient:
        return 4 * scores * FLOAT32_BYTES
    return scores * (FLOAT32_BYTES + role.itemsize)


def _kept_scores(architecture: Architecture, tokens: int, queries: int, mesh: Mesh) -> int:
    """Return the number of scores of all blocks of queries of xla's attention.

    `tokens` counts a device's tokens, `queries` the queries of one row.
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
    mesh, architecture = step.mesh, role.architecture
    row_parts = meshes.row_parts(mesh)
    if row_parts == 1 or isinstance(architecture, DebertaArchitecture):
        return 0
    # If there are fewer key heads than devices that split them, each device has a copy.
    parts = int(mesh.shape["model"])
    width = max(max(n // parts, 1) * size for n, size in architecture.attended_heads)
    return 2 * device_tokens(step, shape) * row_parts * width * role.itemsize


def _pipeline_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes of the hidden states that enter and leave a stage, of rows [R, L]."""
    schedule = schedule_pass(step, role, shape[0])
    if schedule.stages == 1:
        return 0
    # Gathered rows, the input of each tick and its output.
    hidden_rows = schedule.micro_batches + 2 * schedule.ticks
    return hidden_rows * shape[-1] * role.architecture.hidden_size * role.itemsize


def _layer_tokens(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the number of tokens of a micro-batch [R, L] that a device's layer processes at once.

    In stages these are the tokens of one row.
    """
    if schedule_pass(step, role, shape[0]).stages == 1:
        return device_tokens(step, shape)
    return shape[-1]


def head_weight_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of the output embedding in the type of the computation."""
    mesh = step.mesh
    elements = _num_head_elements(role, mesh)
    # For GPUs trained weights are gathered as they are stored, in float32, and then rounded. For
    # TPUs they are rounded first.
    is_wide = role.stored_itemsize > role.itemsize
    if meshes.gathers_weights(mesh) and is_wide and target_platform() != "tpu":
        return elements * (role.itemsize + FLOAT32_BYTES)
    return elements * role.itemsize


def _exchanged_gradient_bytes(role: Role, mesh: Mesh) -> int:
    """Return the bytes that a device receives of the gradient of its output embedding's columns.

    0 if the exchange is a reduce-scatter, which adds up what it receives.
    """
    columns = role.architecture.hidden_size // meshes.weight_shards(mesh)
    is_scattered = target_platform() != "tpu" or columns % TPU_LANES == 0
    if is_scattered or not meshes.gathers_weights(mesh):
        return 0
    return _num_head_elements(role, mesh) * role.stored_itemsize


def _num_head_elements(role: Role, mesh: Mesh) -> int:
    """Return a device's number of elements of the gathered output embedding."""
    architecture = role.architecture
    return architecture.vocab_size * architecture.hidden_size // int(mesh.shape["model"])


def logit_chunk_bytes(role: Role, tokens: int, parts: int) -> int:
    """Return the bytes of a chunk of the logits of `tokens`, in float32."""
    vocab_size = role.architecture.vocab_size
    positions = min(vocabulary_chunks.default_chunk_size(vocab_size), tokens)
    return positions * vocab_size * FLOAT32_BYTES // parts
