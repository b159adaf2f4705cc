"""Memory of each phase by arithmetic alone: exact shapes of arrays, and estimated temporaries."""

import dataclasses

import jax

from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory import head_memory, layer_memory
from jax_ppo.memory.least_memory import Fetched, fetched_by_phase
from jax_ppo.memory.phases import TOGETHER, PhaseMemory
from jax_ppo.memory.pipeline_memory import schedule_rows
from jax_ppo.memory.plan_inputs import FLOAT32_BYTES, SCORING_ROLES, AbstractStep, Role
from jax_ppo.models.attention import query_block_size
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import ScoringOptions
from jax_ppo.runtime import dispatch, meshes
from jax_ppo.runtime.device_memory import bytes_per_device
from jax_ppo.runtime.parallelism.vocabulary import TPU_LANES
from jax_ppo.sampler.constraints import constrains_logits
from jax_ppo.sampler.routing import record_bytes
from jax_ppo.sampler.slots import PREFILL_TOKENS
from jax_ppo.training.stochastic_rounding import gradient_shapes
from jax_ppo.types import MiniBatches

# Measured with 30 layers (docs/scaling.md): 0.3 GiB when weights are loaded, the rest for compiled
# programs and what malloc keeps. Where transformers finds torch and loads it, it takes 0.24 more.
PROCESS_BYTES = 7 * 2**30 // 10


def resident_memory(step: AbstractStep, name: str) -> PhaseMemory:
    """Return the bytes of arrays of known shapes in a phase; `name` is that of its program.

    The sums of weights are those that the check at the start of a run computes.
    """
    least = step.least
    fetched = fetched_by_phase(step.programs.config, step.state).get(name, Fetched())
    gradients = 0
    decoding_copy = 0
    cache = 0
    if name in ("prepare_weights", "sample"):
        decoding_copy = least.decoding
    if name == "sample":
        cache = step.cache_bytes
    if name.startswith("update_"):
        gradients = bytes_per_device(step.role(name.removeprefix("update_")).trained)
    return PhaseMemory(
        parameters=least.parameters + fetched.parameters,
        optimizer=least.optimizer + fetched.optimizer,
        frozen=least.frozen + fetched.frozen,
        gradients=gradients,
        decoding_copy=decoding_copy,
        cache=cache,
        process=PROCESS_BYTES if is_one_cpu() else 0,
    )


def is_one_cpu() -> bool:
    """Return whether the step is for a single CPU, which is also the memory of the process."""
    return target_platform() == "cpu" and dispatch.num_lanes() > 1


def overlap_phases(phases: dict[str, PhaseMemory]) -> dict[str, PhaseMemory]:
    """Return the memory of phases, of which a single CPU runs some at the same time."""
    overlapping = dict(phases)
    for one, other in TOGETHER:
        if is_one_cpu() and one in phases and other in phases:
            overlapping[one] = phases[one].beside(phases[other])
            overlapping[other] = phases[other].beside(phases[one])
    return overlapping


def estimate_phases(step: AbstractStep) -> dict[str, PhaseMemory]:
    """Return the bytes per device in each phase of a step, by the name of its program."""
    programs = step.programs
    options = ScoringOptions.from_config(programs.config)
    temporaries = {
        "prepare_weights": _resharding_temporaries(step),
        "sample": _sampling_temporaries(step),
    }
    for part in options.parts:
        temporaries[f"score_{part}"] = _scoring_temporaries(step, step.role(SCORING_ROLES[part]))
    if programs.nets.reward is not None and programs.reads_rollout:
        temporaries["score_reward"] = _scoring_temporaries(step, step.role("reward"))
    temporaries["estimate"] = 0
    for name, plan in (("actor", step.plans.actor), ("critic", step.plans.critic)):
        if plan is not None:
            temporaries[f"update_{name}"] = _update_temporaries(step, step.role(name), plan)
    plans = step.plans
    batch = bytes_per_device((step.prompts, plans.scoring, plans.actor, plans.critic))
    routing = _routing_bytes(step)
    phases = {
        name: dataclasses.replace(
            resident_memory(step, name), batch=batch + routing, temporaries=value
        )
        for name, value in temporaries.items()
    }
    # During sampling, the record of the step before is in memory, too.
    sample = phases["sample"]
    phases["sample"] = dataclasses.replace(sample, batch=sample.batch + routing)
    return overlap_phases(phases)


def _routing_bytes(step: AbstractStep) -> int:
    """Return the bytes of the record of the experts that a step's tokens passed through."""
    programs = step.programs
    if not programs.sampling.returns_routed_experts:
        return 0
    samples = programs.samples // meshes.row_shards(programs.mesh)
    architecture = programs.nets.actor.architecture
    return record_bytes(architecture, samples, programs.config.sequence_length)


def _resharding_temporaries(step: AbstractStep) -> int:
    """Return the bytes, besides the result, that laying out weights for decoding takes."""
    programs = step.programs
    if target_platform() != "tpu" or not meshes.gathers_weights(programs.mesh):
        return 0
    # Layers are laid out one after another. The compiler for TPUs holds a second copy of an
    # embedding, which it transposes, and three copies if devices also divide the result.
    tables = [x for name, x in step.decoding_weights.items() if not name.startswith("layer_")]
    table = max(bytes_per_device(x) for x in tables)
    if step.rollout_mesh == programs.mesh:
        return table
    return 3 * table


def _sampling_temporaries(step: AbstractStep) -> int:
    """Return the bytes of a prefill and of the logits of all slots."""
    role = step.role("actor")
    config = step.programs.config
    architecture = role.architecture
    mesh = step.rollout_mesh
    assert not isinstance(architecture, DebertaArchitecture), "encoders do not decode"
    parts = mesh.shape["model"]
    prompt = config.data.max_prompt_length
    prompts = max(1, min(PREFILL_TOKENS // prompt, step.queue // config.rollout.n))
    scores = layer_memory.num_scores(architecture, prompts, query_block_size(prompt), prompt, parts)
    score_bytes = scores * (FLOAT32_BYTES + role.itemsize)
    prefill = layer_memory.output_bytes(role, prompts * prompt, mesh, score_bytes=score_bytes)
    # Forbidden strings are found with a tokenizer, which a plan does not have.
    is_constrained = bool(config.rollout.bad_words) or constrains_logits(step.programs.sampling)
    arrays = 3 if is_constrained else 2
    logits = arrays * step.slots * architecture.vocab_size // parts * FLOAT32_BYTES
    padding = 0
    if target_platform() == "tpu":
        # Heads narrower than a lane take as much memory as wide ones.
        width = architecture.head_dim
        padding = step.cache_bytes * (-width % TPU_LANES) // width
    return padding + prefill + logits


def _scoring_temporaries(step: AbstractStep, role: Role) -> int:
    """Return the bytes that a forward pass over a micro-batch needs."""
    packing, _ = step.plans.scoring
    shape = packing.sample.shape[1:]
    tokens = layer_memory.device_tokens(step, shape)
    layers = layer_memory.forward_bytes(step, role, shape)
    head = 0
    if role.has_logits:
        head = head_memory.chunk_bytes(role, tokens, step.programs.mesh.shape["model"])
        head += head_memory.weight_bytes(step, role)
    return layer_memory.cast_weight_bytes(step, role) + _join(step, layers, head)


def _update_temporaries(step: AbstractStep, role: Role, batches: MiniBatches) -> int:
    """Return the bytes that an optimizer step needs besides the sum of gradients."""
    architecture = role.architecture
    mesh = step.programs.mesh
    parts = mesh.shape["model"]
    assert isinstance(role.net, Transformer), "encoders are not trained"
    shape = batches.packing.sample.shape[2:]
    tokens = layer_memory.device_tokens(step, shape)
    schedule = schedule_rows(mesh, shape[0])
    # Gradients are added to the sum as they are computed (training/gradients.py), except in stages,
    # which have those of a micro-batch and those of a tick, and for adapters.
    gradients = 0
    if schedule.stages > 1 or role.net.lora is not None:
        gradients = bytes_per_device(role.trained["layers"]) * min(schedule.stages, 2)
    # In stages, for a device's part of the layers in each tick.
    saved_per_layer = round(layer_memory.saved_bytes(step, role, shape) * schedule.slowdown)
    layers = layer_memory.backward_bytes(step, role, shape)
    head = 0
    gathered_head = 0
    if role.has_logits:
        head = head_memory.chunk_bytes(role, tokens, parts) * 3 // 2
        gathered_head = head_memory.weight_bytes(step, role)
        # The whole output embedding has a gradient in float32, unless only adapters are trained.
        if role.net.lora is None:
            exchanged = head_memory.exchanged_gradient_bytes(role, mesh)
            head = max(head, exchanged) + head_memory.num_elements(role, mesh) * FLOAT32_BYTES
    fixed = layer_memory.cast_weight_bytes(step, role) + architecture.num_layers * saved_per_layer
    if target_platform() == "tpu":
        sums_in_float32 = step.programs.config.actor.optim.gradient_dtype == "float32"
        trains_head = role.has_logits and role.net.lora is None
        is_exchanged_once = meshes.gathers_weights(
            mesh
        ) and not head_memory.exchanged_gradient_bytes(role, mesh)
        if trains_head and sums_in_float32 and is_exchanged_once:
            # Each device has a whole sum of the output embedding's gradients: devices add theirs
            # up once per mini-batch.
            fixed += head_memory.num_elements(role, mesh) * FLOAT32_BYTES
        # The layers' gradients follow the head's; of the head, only the weights remain.
        return fixed + gathered_head + max(gradients + layers, head)
    backward = fixed + gradients + _join(step, layers, head + gathered_head)
    if target_platform() == "cpu":
        return max(backward, _optimizer_temporaries(role))
    return backward


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
    if meshes.gathers_weights(step.programs.mesh):
        return layers + head
    return max(layers, head)
