"""Operations, bytes and exchanges of each phase of a step, and its seconds by the roofline model.

All prompts and responses are assumed to have their maximum lengths. A phase takes as long as the
slowest of its matrix products, its memory traffic and its exchanges at the device's peak rate
(Williams et al. 2009, doi 10.1145/1498765.1498785): a lower bound, not a measurement.
"""

import dataclasses
import math
import operator

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_ppo.memory.abstract_step import AbstractStep, Role
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.heads import without_part
from jax_ppo.models.layers import LayerKind, layer_kinds
from jax_ppo.ppo import programs
from jax_ppo.ppo.partial_rollouts import BATCHES_IN_POOL
from jax_ppo.ppo.programs import StepProgram, planned_programs
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import PeakRates, bytes_per_device
from jax_ppo.runtime.parallelism import pipeline
from jax_ppo.sampler.stages import cache_bytes_per_device, stage_limits
from jax_ppo.training.networks import Networks
from jax_ppo.training.roles import ModelRole, find_role
from jax_ppo.types import MiniBatches, Packing, Params


@dataclasses.dataclass(frozen=True)
class PhaseWork:
    """Work of one device in one phase of a step, by arithmetic."""

    flops: float = 0.0  # operations of matrix products; recomputed activations count too
    memory_bytes: float = 0.0  # bytes read from and written to the device's memory
    link_bytes: float = 0.0  # bytes that the device sends to others
    # The part of them that the mesh's axes of rows exchange: gathered weights and gradients, which
    # cross from host to host.
    row_bytes: float = 0.0

    def __add__(self, other: "PhaseWork") -> "PhaseWork":
        return PhaseWork(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, times: float) -> "PhaseWork":
        return PhaseWork(*(figure * times for figure in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """The micro-batches of one pass through the layers; a single one without stages."""

    stages: int  # S
    micro_batches: int  # M, each of one row per device

    @property
    def ticks(self) -> int:
        """Return the number of times that a device runs its own layers, M + S - 1."""
        return self.micro_batches + self.stages - 1

    @property
    def slowdown(self) -> float:
        """Return the time in the layers as a multiple of that without a bubble."""
        return 1 / (1 - self.bubble)

    @property
    def bubble(self) -> float:
        """Return the share of the time in the layers in which a stage has no micro-batch."""
        return pipeline.bubble(self.stages, self.micro_batches)


def schedule_rows(mesh: Mesh | AbstractMesh, rows: int) -> StageSchedule:
    """Return the schedule of a mesh's stages for `rows` packed rows, over all devices."""
    stages = mesh.shape["stage"]
    if stages == 1:
        return StageSchedule(stages=1, micro_batches=1)
    return StageSchedule(stages=stages, micro_batches=stages * rows // meshes.row_shards(mesh))


def schedule_pass(step: AbstractStep, role: Role, rows: int) -> StageSchedule:
    """Return the schedule of the stages in a pass; an encoder has a single stage."""
    if isinstance(role.architecture, DebertaArchitecture):
        return StageSchedule(stages=1, micro_batches=1)
    return schedule_rows(step.mesh, rows)


def count_bubbles(step: AbstractStep) -> dict[str, float]:
    """Return the bubble of each phase that runs a model's layers, by the name of its program."""
    bubbles = {}
    for program in planned_programs(step):
        if program.kind == "forward pass":
            rows = step.packed.read_by(program.role)[0].sample.shape[1]
        elif program.kind == "update":
            rows = step.packed.mini_batches[program.role].packing.sample.shape[2]
        else:
            continue
        bubbles[program.name] = schedule_pass(step, step.role(program.role), rows).bubble
    return bubbles


def whole_read_params(params: Params) -> Params:
    """Return the parameters that a pass reads whole: without further embeddings.

    Of these it looks up the rows of its tokens alone, wherever a device stores them.
    """
    return without_part(params, "embed_per_layer")


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

    `tokens` are the device's own; `itemsize` is the bytes of a number of the computation.
    """
    if not architecture.num_experts:
        return 0.0
    other_devices = mesh.shape["expert"] - 1
    return architecture.num_expert_layers * (
        2 * other_devices * tokens * architecture.hidden_size * itemsize
    )


def tokens_at_experts(architecture: Architecture, mesh: Mesh | AbstractMesh) -> int:
    """Return the maximum number of tokens that a device's experts get, per token of the device.

    Any token of the devices along `expert` may select any expert.
    """
    if not architecture.num_experts:
        return 1
    return mesh.shape["expert"]


def _count_elements(params: Params) -> tuple[int, int]:
    """Return the number of parameters read whole outside of experts, and of experts."""
    experts = 0
    total = 0
    for path, x in jax.tree_util.tree_leaves_with_path(whole_read_params(params)):
        total += x.size
        if "experts" in jax.tree_util.keystr(path, simple=True, separator="/").split("/"):
            experts += x.size
    return total - experts, experts


# AdamW reads and writes parameters and two moments in float32, and reads the gradient twice, for
# its norm and for the step. A micro-batch's gradient is written, read and added to the sum.
_OPTIMIZER_BYTES = 6 * 4 + 2 * 4
_ACCUMULATION_BYTES = 4 * 4
_GRADIENT_ITEMSIZE = 4
# Times that the hidden states [tokens, D] of a layer, and its products' outputs, move between
# memory and the device in a forward pass, if norms and activations are fused into the products.
_HIDDEN_MOVES = 10
_OUTPUT_MOVES = 2
# Exchanges of [tokens, D] per layer with tensor parallelism: after attention and after the MLP.
_SUMS_PER_LAYER = 2


def count_work(step: AbstractStep) -> dict[str, PhaseWork]:
    """Return the work of one device in each phase, by the program's name."""
    return {program.name: _count_program_work(step, program) for program in planned_programs(step)}


def _count_program_work(step: AbstractStep, program: StepProgram) -> PhaseWork:
    passes = program.passes(step.step_options, step.nets)
    match program.kind:
        case "resharding":
            return _prepare_weights(step) * passes
        case "sampling":
            return _sample(step) * (passes / step.sampling.n)
        case "forward pass":
            return _forward_pass(step, program.role) * passes
        case "elementwise":
            # A few passes over arrays of one number per token.
            return PhaseWork(memory_bytes=10.0 * bytes_per_device(step.prompts))
        case "update":
            batches = step.packed.mini_batches[program.role]
            work = _update(step, step.role(program.role), batches, passes)
            for name in program.reads(step.step_options):
                work += _forward_pass(step, name) * passes
            return work


def predict_seconds(
    work: PhaseWork, rates: PeakRates | None, network_bytes: float | None
) -> float | None:
    """Return the seconds of a phase at peak rates; `None` if the rates are unknown.

    `network_bytes` of gathered weights and gradients cross the network between hosts per second and
    device; `None` if there is none.
    """
    if rates is None or not rates.memory_bytes or not rates.link_bytes:
        return None
    seconds = [
        work.flops / rates.flops,
        work.memory_bytes / rates.memory_bytes,
        work.link_bytes / rates.link_bytes,
    ]
    if network_bytes:
        seconds.append(work.row_bytes / network_bytes)
    return max(seconds)


def _prepare_weights(step: AbstractStep) -> PhaseWork:
    weights, sent = bytes_per_device(step.decoding_weights), 0
    if step.is_separate:
        # Each device that learns gathers the whole copy; one of each host sends others their parts.
        sent = weights * step.rollout_mesh.size // step.hosts
        weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.decoding_weights))
    received = weights * received_share(step.decoding_weights, step.mesh)
    return PhaseWork(
        memory_bytes=float(bytes_per_device(step.state.actor) + 2 * weights),
        link_bytes=received + sent,
        row_bytes=received,
    )


def _sample(step: AbstractStep) -> PhaseWork:
    """Return the work of prefill and decoding, stage by stage."""
    mesh = step.rollout_mesh
    architecture = step.nets.actor.architecture
    num_prompts, prompt = step.prompts.tokens.shape
    samples = step.samples
    weights = bytes_per_device(whole_read_params(step.decoding_weights))
    sampling = step.sampling
    limits = stage_limits(sampling)
    queue = step.queue
    continues = step.step_options.rollout.max_staleness > 1
    if continues:
        assert sampling.stage_length is not None
        longest = sampling.max_response_length
        limits = (*range(sampling.stage_length, longest, sampling.stage_length), longest)
        queue //= BATCHES_IN_POOL  # what one batch of prompts takes, in whichever steps
    # A further one continues what `rollout.exact` draws again.
    cache = max(cache_bytes_per_device(stage, mesh) for stage in step.caches[: len(limits)])
    role = step.role("actor")
    total = PhaseWork()
    start = 0
    for limit in limits:
        # Later stages process the tokens drawn in earlier ones again, for each sample.
        prompts = num_prompts if start == 0 and not continues else samples
        prefilled = np.full(prompts, prompt + start)
        width = max(1, step.slots * (prompt + limits[0]) // (prompt + limit))
        if continues:
            width = min(step.slots, queue)
        steps = (limit - start) * -(-queue // width)
        whole = np.full(samples, prompt + limit)
        flops = count_forward_flops(architecture, prefilled)
        flops += count_forward_flops(architecture, whole, samples * (limit - start))
        flops -= count_forward_flops(architecture, np.full(samples, prompt + start))
        tokens = prompts * (prompt + start) / meshes.row_shards(mesh) + steps * width
        total += PhaseWork(
            flops=flops / step.rollout_mesh.size,
            # Each step reads all weights and the whole cache; cuDNN reads only its used part.
            memory_bytes=steps * float(weights + cache),
            link_bytes=(
                _tensor_parallel_bytes(role, tokens, mesh.shape["model"])
                + exchanged_bytes(architecture, tokens, role.itemsize, mesh)
            ),
        )
        start = limit
    return total


def _forward_pass(step: AbstractStep, name: str) -> PhaseWork:
    """Return the work of a role's forward pass over all packed rows."""
    role = step.role(name)
    packing, _ = step.packed.read_by(name)
    micro_batches, rows, length = packing.sample.shape
    products = PhaseWork(flops=_rollout_flops(step, role, packing))
    return _pass_work(step, role, rows, length) * micro_batches + products


def _update(step: AbstractStep, role: Role, batches: MiniBatches, epochs: int) -> PhaseWork:
    """Return the work of all optimizer steps of a role."""
    steps, micro_batches, rows, length = batches.packing.sample.shape
    forward = _pass_work(step, role, rows, length)
    # The backward pass has products for the gradients of inputs and, unless only adapters are
    # trained, of weights. With gradient checkpointing, the forward products are computed twice,
    # unless the policy keeps them.
    recomputed = int(role.net.remat and role.net.remat_policy != "dots")
    backward = 2 if role.net.lora is None else 1
    flops = _rollout_flops(step, role, batches.packing, steps // epochs)
    products = PhaseWork(flops=flops * (1 + recomputed + backward) * epochs)
    # The backward pass moves what the forward pass moves twice, and gathers the weights again.
    passes = PhaseWork(
        memory_bytes=forward.memory_bytes * (3 + recomputed),
        link_bytes=forward.link_bytes * 2,
        row_bytes=forward.row_bytes * 2,
    )
    gradient = bytes_per_device(role.trained)
    elements = gradient / _GRADIENT_ITEMSIZE
    summed = _gradient_link_bytes(step, role, gradient, schedule_pass(step, role, rows))
    sums = PhaseWork(
        memory_bytes=elements * _ACCUMULATION_BYTES, link_bytes=summed, row_bytes=summed
    )
    optimizer = PhaseWork(memory_bytes=elements * _OPTIMIZER_BYTES)
    return products + ((passes + sums) * micro_batches + optimizer) * steps


def _rollout_flops(
    step: AbstractStep, role: Role, packing: Packing, mini_batches: int = 1
) -> float:
    """Return the operations per device of a forward pass over all samples.

    A stage without a micro-batch counts as if it had one. The U = `mini_batches` parts of the
    rollout do not share prompts with each other.
    """
    samples, longest = step.samples, step.sampling.max_response_length
    lengths = np.full(samples, step.step_options.sequence_length)
    num_logits = samples * longest if role.has_logits else 0
    layers = count_forward_flops(role.architecture, lengths)
    logits = count_forward_flops(role.architecture, lengths, num_logits) - layers
    if n := packing.samples_per_prompt:
        prompt = step.step_options.sequence_length - longest
        # Mini-batches draw their samples one by one: one of U is expected to have samples of a
        # share 1 - (1 - 1 / U)^n of all prompts. Each row has its own copy.
        drawn = mini_batches * (samples / n) * (1 - (1 - 1 / mini_batches) ** n)
        responses_per_row = (packing.sample.shape[-1] - prompt + 1) // (longest + 1)
        copies = max(drawn, samples / responses_per_row)
        # All but the last token of a prompt are computed once for the samples that share it.
        copy = count_forward_flops(role.architecture, np.array([prompt - 1]))
        layers -= (samples - copies) * copy
    layers *= schedule_pass(step, role, packing.sample.shape[-2]).slowdown
    return (layers + logits) / step.mesh.size


def _pass_work(step: AbstractStep, role: Role, rows: int, length: int) -> PhaseWork:
    """Return memory traffic and exchanges of a device in a forward pass over all `rows`."""
    mesh = step.mesh
    architecture = role.architecture
    schedule = schedule_pass(step, role, rows)
    weights = _gathered_bytes(step, role, schedule)
    if isinstance(architecture, DebertaArchitecture):
        return PhaseWork(memory_bytes=weights)
    own_tokens = rows * length / meshes.row_shards(mesh)
    # A device runs its part of the layers on the rows of all stages.
    tokens = own_tokens * schedule.slowdown
    parts = mesh.shape["model"]
    sizes = architecture.attended_heads
    heads = sum((architecture.num_heads + 2 * n) * size for n, size in sizes) / len(sizes)
    mlp = len(architecture.mlp_projections) * architecture.active_width
    outputs = (heads + mlp) / parts
    moved = _HIDDEN_MOVES * architecture.hidden_size + _OUTPUT_MOVES * outputs
    received = weights * received_share(role.params, mesh)
    if schedule.stages > 1:
        # One row of hidden states per tick, the first stage's inputs and the last stage's outputs.
        hidden_rows = schedule.ticks + 2 * schedule.micro_batches
        received += hidden_rows * length * architecture.hidden_size * role.itemsize
    return PhaseWork(
        memory_bytes=weights + tokens * architecture.num_layers * moved * role.itemsize,
        link_bytes=(
            received
            + _tensor_parallel_bytes(role, tokens, parts)
            + _gathered_keys_bytes(role, tokens, meshes.row_parts(mesh), parts)
            + exchanged_bytes(architecture, tokens, role.itemsize, mesh)
        ),
        row_bytes=received,
    )


def _gathered_bytes(step: AbstractStep, role: Role, schedule: StageSchedule) -> float:
    """Return the bytes of weights that a device reads in a pass; each tick reads its layers."""
    mesh = step.mesh
    layers = multiplied_elements(role.params["layers"], mesh)
    others = multiplied_elements(role.params, mesh) - layers
    elements = others + layers / schedule.stages * schedule.ticks
    return elements * role.itemsize / mesh.shape["model"]


def _tensor_parallel_bytes(role: Role, tokens: float, parts: int) -> float:
    """Return the bytes that a device sends to sum the outputs of split products."""
    architecture = role.architecture
    hidden = tokens * architecture.hidden_size * role.itemsize
    # A ring sends each part once to sum it and once to spread the sum.
    return architecture.num_layers * _SUMS_PER_LAYER * hidden * 2 * (parts - 1) / parts


def _gathered_keys_bytes(role: Role, tokens: float, row_parts: int, parts: int) -> float:
    """Return the bytes of keys and values that a device receives of the other parts of its rows."""
    architecture = role.architecture
    # If there are fewer key heads than devices that split them, each device has a copy.
    widths = sum(max(n / parts, 1) * size for n, size in architecture.attended_heads)
    return 2 * tokens * widths * role.itemsize * (row_parts - 1)


def _gradient_link_bytes(
    step: AbstractStep, role: Role, gradient: int, schedule: StageSchedule
) -> float:
    """Return the bytes that a device sends to sum the gradient of a micro-batch."""
    mesh = step.mesh
    copies = mesh.shape["data"]
    scattered = 0.0
    # Adapters are too small to matter.
    if role.params is role.trained or role.net.lora is None:
        scattered = _gathered_bytes(step, role, schedule) * received_share(role.params, mesh)
    return scattered + gradient * 2 * (copies - 1) / copies


def count_step_flops(
    options: StepOptions,
    nets: Networks,
    step: int,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    whole_prompts: dict[str, np.ndarray] | None = None,
) -> float:
    """Return the FLOPs that sampling, forward passes and update of a step need.

    Recomputed activations do not count, and while sampling a prompt counts once for all of its
    responses; in the other phases as often as rows hold it. All of `ppo_epochs` count, even if
    `actor.target_kl` cut them short. A reward model with its own tokenizer counts as if its inputs
    were as long as the samples.

    `prompt_lengths` are int [N]; `lengths`, of prompt and response, int [B], those of a prompt
    adjacent; `whole_prompts` is `RolloutPacking.whole_prompts`, `None` if samples share none.
    """
    repeated_lengths = np.repeat(prompt_lengths, len(lengths) // len(prompt_lengths))
    num_logits = int((lengths - repeated_lengths).sum())
    policy = nets.actor.architecture
    policy_pass = count_forward_flops(policy, lengths, num_logits)

    # 1. Sampling: a prompt is read once for all of its responses.
    flops = policy_pass
    flops -= count_forward_flops(policy, repeated_lengths)
    flops += count_forward_flops(policy, prompt_lengths)

    # 2. Forward passes and updates; during the critic's warm-up the actor's parameters stay.
    def role_passes(role: ModelRole, passes: int, rows: str) -> float:
        logits = num_logits if role.has_logits else 0
        architecture = role.model(nets).architecture
        flops = passes * count_forward_flops(architecture, lengths, logits)
        if whole_prompts is not None and role.name != "reward":
            # Of a prompt that another sample has, only the last token is computed.
            shared = np.repeat(repeated_lengths - 1, passes - whole_prompts[rows])
            flops -= count_forward_flops(architecture, shared)
        return flops

    actor_learns = options.forward.shared_trunk or step >= options.update.warmup_steps
    for program in programs.PROGRAMS:
        passes = program.passes(options, nets)
        if not (passes and program.role):
            continue
        role = find_role(program.role)
        if program.kind == "forward pass":
            flops += passes * role_passes(role, 1, "forward")
        elif program.kind == "update" and (role.name != "actor" or actor_learns):
            # The backward pass has a product for the gradient of each product's input and, unless
            # only adapters are trained, one for that of its weights.
            training_passes = 3 if role.model(nets).lora is None else 2
            flops += training_passes * role_passes(role, passes, role.name)
            for name in program.reads(options):
                flops += role_passes(find_role(name), passes, role.name)
    return flops


def count_forward_flops(
    architecture: Architecture | DebertaArchitecture, lengths: np.ndarray, num_logits: int = 0
) -> float:
    """Return the FLOPs of the matrix products of a forward pass over sequences.

    A multiplication and an addition count as two, as in PaLM (arXiv 2204.02311, appendix B). Of the
    experts, those that a token passes through count.
    Attention counts the pairs of tokens that see each other, not those that are masked. Norms,
    activations, biases and a scalar head are left out, and so are the relative terms of DeBERTa.

    `lengths` are int [B], the tokens of each sequence, and `num_logits` is the number of tokens for
    which logits over the vocabulary are computed.
    """
    lengths = lengths.astype(np.float64)
    if isinstance(architecture, DebertaArchitecture):
        width = architecture.hidden_size
        matrices = 4 * width**2 + 2 * width * architecture.intermediate_size
        per_layer = 2 * matrices * lengths.sum() + 4 * width * (lengths**2).sum()
        return float(architecture.num_layers * per_layer)
    D = architecture.hidden_size
    projections = len(architecture.mlp_projections)
    mlp = projections * D * architecture.active_width
    # The router, and the gate of an expert that every token passes through.
    has_gate = architecture.shared_expert_size > 0 and architecture.shared_expert_gate
    mlp += D * (architecture.num_experts + has_gate)
    # The three products of further embeddings of a layer.
    further = 3 * D * architecture.per_layer_size
    flops = 0.0
    for kind in layer_kinds(architecture):
        if kind.is_linear:
            mixer = _linear_products(architecture)
        else:
            mixer = _attention_products(architecture, kind)
        own_mlp = projections * D * architecture.dense_size if kind.is_dense else mlp
        flops += 2 * (mixer + own_mlp + further) * lengths.sum()
        if kind.is_linear:
            continue
        window = architecture.sliding_window if kind.is_local else None
        _, width = architecture.kv_heads(kind.is_local)
        widths = architecture.num_heads * (width + (architecture.value_head_dim or width))
        # The products with keys and with values: two per pair and per number of a head.
        flops += 2 * widths * _visible_pairs(lengths, window)
    return float(flops + 2 * architecture.vocab_size * D * num_logits)


def _attention_products(architecture: Architecture, kind: LayerKind) -> int:
    """Return the products of the projections of attention for a token, of whole sequences."""
    a = architecture
    heads, width = a.kv_heads(kind.is_local)
    D, queries = a.hidden_size, a.num_heads * width
    if not a.latent_size:
        projected = 0 if kind.is_shared else 2 - (a.keys_as_values and not kind.is_local)
        return D * ((2 + a.output_gate) * queries + projected * heads * width)
    values = a.num_heads * a.value_head_dim
    keys = queries - a.num_heads * a.rope_head_dim
    of_queries = a.query_latent_size * queries if a.query_latent_size else D * queries
    return D * (a.latent_width + values) + of_queries + a.latent_size * (keys + values)


def _linear_products(architecture: Architecture) -> int:
    """Return the products of a short convolution or a Gated DeltaNet for a token.

    The state of a DeltaNet is read twice and changed. Chunks need more products, as many as are
    fastest.
    """
    a = architecture
    if a.block == "convolution":
        return (4 * a.hidden_size + a.delta_window) * a.hidden_size
    channels, values = sum(a.delta_widths), a.delta_widths[2]
    projections = a.hidden_size * (channels + 2 * values + 2 * a.delta_value_heads)
    return projections + 3 * values * a.delta_key_dim


def _visible_pairs(lengths: np.ndarray, window: int | None) -> float:
    """Return how many (query, key) pairs a causal mask shows; each token sees itself."""
    pairs = lengths * (lengths + 1) / 2
    if window is not None:
        hidden = np.maximum(lengths - window, 0)
        pairs = pairs - hidden * (hidden + 1) / 2
    return float(pairs.sum())
