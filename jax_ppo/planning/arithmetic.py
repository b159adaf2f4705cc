"""Memory of each phase by arithmetic alone: exact shapes of arrays, and estimated temporaries."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.kernels.platform import target_platform
from jax_ppo.models.attention import query_block_size
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.planning.experts import multiplied_elements, tokens_at_experts
from jax_ppo.planning.phases import PhaseMemory
from jax_ppo.planning.setup import AbstractStep, Role
from jax_ppo.planning.stages import schedule_rows
from jax_ppo.ppo.memory_check import Fetched, fetched_by_phase
from jax_ppo.ppo.scoring import ScoringOptions
from jax_ppo.runtime import meshes
from jax_ppo.runtime.device_memory import bytes_per_device
from jax_ppo.sampler.constraints import constrains_logits
from jax_ppo.sampler.routing import record_bytes
from jax_ppo.sampler.slots import PREFILL_TOKENS
from jax_ppo.types import MiniBatches

_FLOAT32 = 4
# TPUs pad the last axis of an array to this number of elements.
_TPU_LANES = 128


def resident_memory(step: AbstractStep, name: str) -> PhaseMemory:
    """Return the bytes of arrays of known shapes in a phase; `name` is that of its program.

    The sums of weights are those of the check at the start of a run.
    """
    least = step.least
    samples = name in ("prepare_weights", "sample")
    fetched = fetched_by_phase(step.programs.config, step.state).get(name, Fetched())
    gradients = 0
    if name.startswith("update_"):
        gradients = bytes_per_device(step.role(name.removeprefix("update_")).trained)
    return PhaseMemory(
        parameters=least.parameters + fetched.parameters,
        optimizer=least.optimizer + fetched.optimizer,
        frozen=least.frozen + fetched.frozen,
        gradients=gradients,
        decoding_copy=least.decoding if samples else 0,
        cache=step.cache_bytes if name == "sample" else 0,
    )


def estimate_phases(step: AbstractStep) -> dict[str, PhaseMemory]:
    """Return the bytes per device in each phase of a step, by the name of its program."""
    programs = step.programs
    options = ScoringOptions.from_config(programs.config)
    temporaries = {
        "prepare_weights": _resharding_temporaries(step),
        "sample": _sampling_temporaries(step),
    }
    for part in options.parts:
        role = step.role("actor" if part == "policy" else "critic")
        temporaries[f"score_{part}"] = _scoring_temporaries(step, role)
    if programs.nets.reward is not None and programs.reads_rollout:
        temporaries["score_reward"] = _scoring_temporaries(step, step.role("reward"))
    temporaries["estimate"] = 0
    for name, plan in (("actor", step.plans.actor), ("critic", step.plans.critic)):
        if plan is not None:
            temporaries[f"update_{name}"] = _update_temporaries(step, step.role(name), plan)
    plans = step.plans
    batch = bytes_per_device((step.prompts, plans.scoring, plans.actor, plans.critic))
    routing = _routing_bytes(step)
    return {
        name: dataclasses.replace(
            resident_memory(step, name),
            # While responses are sampled, there is also the record of the step before.
            batch=batch + (2 if name == "sample" else 1) * routing,
            temporaries=value,
        )
        for name, value in temporaries.items()
    }


def _routing_bytes(step: AbstractStep) -> int:
    """Return the bytes of the experts that a step's tokens passed through, if they are recorded."""
    programs = step.programs
    if not programs.sampling.returns_routed_experts:
        return 0
    samples = programs.samples // meshes.row_shards(programs.mesh)
    architecture = programs.nets.actor.architecture
    return record_bytes(architecture, samples, programs.config.sequence_length)


def _is_tpu() -> bool:
    return target_platform() == "tpu"


def _resharding_temporaries(step: AbstractStep) -> int:
    """Return what it takes to lay the weights out for decoding, beside the result."""
    programs = step.programs
    if not _is_tpu() or not meshes.gathers_weights(programs.mesh):
        return 0
    # Layers follow one another. The compiler for TPUs holds an embedding, whose columns and rows
    # change places, once more; three times if devices share out the result, too.
    tables = [x for name, x in step.decoding_weights.items() if not name.startswith("layer_")]
    table = max(bytes_per_device(x) for x in tables)
    return table if step.rollout_mesh == programs.mesh else 3 * table


def _sampling_temporaries(step: AbstractStep) -> int:
    """Return what sampling needs beside weights and cache: a prefill, and logits of all slots."""
    role, config = step.role("actor"), step.programs.config
    architecture, mesh = role.architecture, step.rollout_mesh
    assert not isinstance(architecture, DebertaArchitecture), "encoders do not decode"
    parts = mesh.shape["model"]
    count = config.data.train_batch_size
    queue = meshes.rows_per_shard(mesh, count) * (step.programs.samples // count)
    slots = min(step.programs.sampling.slots or queue, queue)
    prompt = config.data.max_prompt_length
    prompts = max(1, min(PREFILL_TOKENS // prompt, queue // config.rollout.n))
    prefill = _layer_bytes(role, prompts * prompt, mesh)
    # Forbidden strings are found with a tokenizer, which a plan does not have.
    is_constrained = bool(config.rollout.bad_words) or constrains_logits(step.programs.sampling)
    arrays = 3 if is_constrained else 2
    logits = arrays * slots * architecture.vocab_size // parts * _FLOAT32
    padding = 0
    if _is_tpu():
        # Heads that are narrower than a lane take as much memory as wide ones.
        width = architecture.head_dim
        padding = step.cache_bytes * (-width % _TPU_LANES) // width
    return padding + prefill + logits


def _scoring_temporaries(step: AbstractStep, role: Role) -> int:
    """Return what a forward pass over a micro-batch needs."""
    packing, _ = step.plans.scoring
    shape = packing.sample.shape[1:]
    tokens = _device_tokens(step, shape)
    layers = _layer_bytes(role, _layer_tokens(step, role, shape), step.programs.mesh)
    layers += _gathered_layers(step, role) + _pipeline_bytes(step, role, shape)
    layers += _row_bytes(step, role, shape) + _pair_bytes(step, role, shape)
    head = 0
    if role.has_logits:
        head = _chunk_bytes(role, tokens, step.programs.mesh.shape["model"])
        head += _head_bytes(step, role)
    return _cast_weights(step, role) + _join(step, layers, head)


def _update_temporaries(step: AbstractStep, role: Role, batches: MiniBatches) -> int:
    """Return what an optimizer step needs beside the sum of gradients."""
    architecture, mesh = role.architecture, step.programs.mesh
    parts = mesh.shape["model"]
    assert isinstance(role.net, Transformer), "encoders are not trained"
    shape = batches.packing.sample.shape[2:]
    tokens = _device_tokens(step, shape)
    schedule = schedule_rows(mesh, shape[0])
    # The gradients of a micro-batch; those outside the layers are added to the sum at once. In
    # stages there are those of a tick, too.
    gradients = bytes_per_device(role.trained["layers"]) * min(schedule.stages, 2)
    # The input of each layer is kept and the layer computed again, or all of it is kept; in stages,
    # of a device's part of the layers in each tick.
    kept = _layer_bytes(role, tokens, mesh)
    if role.net.remat:
        kept = tokens * architecture.hidden_size * role.itemsize
    kept = round(kept * schedule.slowdown)
    layers = _layer_bytes(role, _layer_tokens(step, role, shape), mesh) * 3 // 2
    layers += _gathered_layers(step, role)
    # Hidden states, and their gradients.
    layers += 2 * _pipeline_bytes(step, role, shape)
    layers += 2 * _row_bytes(step, role, shape)
    layers += _pair_bytes(step, role, shape, with_gradient=True)
    head = gathered_head = 0
    if role.has_logits:
        head = _chunk_bytes(role, tokens, parts) * 3 // 2
        gathered_head = _head_bytes(step, role)
        # The whole output embedding has a gradient in float32, unless only adapters learn.
        if role.net.lora is None:
            head += architecture.vocab_size * architecture.hidden_size // parts * _FLOAT32
    fixed = _cast_weights(step, role) + architecture.num_layers * kept
    if _is_tpu():
        sums_in_float32 = step.programs.config.actor.optim.gradient_dtype == "float32"
        learns_head = role.has_logits and role.net.lora is None
        if learns_head and sums_in_float32 and meshes.gathers_weights(mesh):
            # Each device has a whole sum of the output embedding's gradients: devices add theirs
            # up once per mini-batch.
            fixed += architecture.vocab_size * architecture.hidden_size // parts * _FLOAT32
        # The layers' gradients begin when the head's are done, of which the weights alone stay.
        return fixed + gathered_head + max(gradients + layers, head)
    return fixed + gradients + _join(step, layers, head + gathered_head)


def _join(step: AbstractStep, layers: int, head: int) -> int:
    """Return the memory of layers and head, which follow each other.

    Where weights are gathered, the head's arrive while the layers run.
    """
    return layers + head if meshes.gathers_weights(step.programs.mesh) else max(layers, head)


def _device_tokens(step: AbstractStep, shape: tuple[int, ...]) -> int:
    """Return the tokens of a device in a micro-batch of [R, L]."""
    return int(np.prod(shape)) // meshes.row_shards(step.programs.mesh)


def _layer_tokens(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the tokens that a layer has at once on a device, of a micro-batch of [R, L].

    In stages they are those of one row.
    """
    is_encoder = isinstance(role.architecture, DebertaArchitecture)
    if step.programs.mesh.shape["stage"] == 1 or is_encoder:
        return _device_tokens(step, shape)
    return shape[-1]


def _pipeline_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes of the hidden states that enter and leave a stage, of rows [R, L]."""
    schedule = schedule_rows(step.programs.mesh, shape[0])
    if schedule.stages == 1 or isinstance(role.architecture, DebertaArchitecture):
        return 0
    # Gathered rows, the input of each tick and its output.
    hidden_rows = schedule.micro_batches + 2 * schedule.ticks
    return hidden_rows * shape[-1] * role.architecture.hidden_size * role.itemsize


def _row_bytes(step: AbstractStep, role: Role, shape: tuple[int, ...]) -> int:
    """Return the bytes of the keys and values of whole rows, if devices hold parts of them."""
    mesh, architecture = step.programs.mesh, role.architecture
    row_parts = meshes.row_parts(mesh)
    if row_parts == 1 or isinstance(architecture, DebertaArchitecture):
        return 0
    # With fewer key heads than devices that split them, each device has copies.
    heads = max(architecture.num_kv_heads // int(mesh.shape["model"]), 1)
    tokens = _device_tokens(step, shape) * row_parts
    return 2 * tokens * heads * architecture.head_dim * role.itemsize


def _pair_bytes(
    step: AbstractStep, role: Role, shape: tuple[int, ...], with_gradient: bool = False
) -> int:
    """Return the bytes of what attention makes for each pair of a query and a key.

    cuDNN reads a mask in the type of the computation, the same for all heads and for gradients. xla
    has scores and weights of each head in float32, for a block of queries at once, and their
    gradients. Splash has none of these.
    """
    mesh, net = step.programs.mesh, role.net
    if not isinstance(net, Transformer) or net.attention == "splash":
        return 0
    queries, row_parts = shape[-1], meshes.row_parts(mesh)
    rows = _layer_tokens(step, role, shape) // queries
    keys = queries * row_parts
    if net.attention == "cudnn":
        return rows * queries * keys * role.itemsize
    block = min(queries, query_block_size(queries)) if row_parts == 1 else queries // 2
    heads = -(-net.architecture.num_heads // int(mesh.shape["model"]))
    arrays = 4 if with_gradient else 2
    return arrays * rows * heads * block * keys * _FLOAT32


def _cast_weights(step: AbstractStep, role: Role) -> int:
    """Return the bytes of weights in the type of the computation, made from float32.

    The compiler for TPUs converts a device's part of all layers before it runs, or gathers, the
    first.
    """
    if not _is_tpu() or role.itemsize == _FLOAT32:
        return 0
    wide = [x for x in jax.tree.leaves(role.params) if x.dtype.itemsize == _FLOAT32]
    return bytes_per_device(wide) * role.itemsize // _FLOAT32


def _gathered_layers(step: AbstractStep, role: Role) -> int:
    """Return the bytes of gathered layers, in the compilers' order of gathering and rounding."""
    if not meshes.gathers_weights(step.programs.mesh):
        return 0
    mesh = step.programs.mesh
    layers = multiplied_elements(role.params["layers"], mesh)
    elements = layers // role.architecture.num_layers // mesh.shape["model"]
    # For TPUs a layer is rounded first, and each of its matrices arrives, or its gradient leaves,
    # while it is multiplied: there is never more than one layer, in the backward pass neither.
    if _is_tpu():
        return elements * role.itemsize
    # For GPUs the present layer and the next are gathered in float32.
    return 2 * elements * _stored_itemsize(role)


def _head_bytes(step: AbstractStep, role: Role) -> int:
    """Return the bytes of the output embedding in the type of the computation."""
    mesh, architecture = step.programs.mesh, role.architecture
    assert not isinstance(architecture, DebertaArchitecture), "encoders have no logits"
    elements = architecture.vocab_size * architecture.hidden_size // mesh.shape["model"]
    # For GPUs trained weights are gathered in float32, in which they are stored, and then rounded.
    # For TPUs they are rounded first.
    is_wide = _stored_itemsize(role) > role.itemsize
    is_gathered_wide = meshes.gathers_weights(mesh) and is_wide and not _is_tpu()
    return elements * (role.itemsize + (_FLOAT32 if is_gathered_wide else 0))


def _stored_itemsize(role: Role) -> int:
    """Return the bytes of a stored number: trained parameters are float32, frozen ones are not."""
    return int(role.params["embed"]["embedding"].dtype.itemsize)


def _chunk_bytes(role: Role, tokens: int, parts: int) -> int:
    """Return the bytes of a chunk of the logits of `tokens`, in float32."""
    architecture = role.architecture
    assert not isinstance(architecture, DebertaArchitecture), "encoders have no logits"
    chunk = vocabulary_chunks.default_chunk_size(architecture.vocab_size, target_platform())
    return min(chunk, tokens) * architecture.vocab_size * _FLOAT32 // parts


def _layer_bytes(role: Role, tokens: int, mesh: Mesh) -> int:
    """Return the bytes of the outputs of a layer's products for `tokens`."""
    architecture, parts = role.architecture, mesh.shape["model"]
    width = 4 * architecture.hidden_size
    mlp = 3 * architecture.intermediate_size // parts
    if not isinstance(architecture, DebertaArchitecture):
        heads = (2 * architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim
        width += heads // parts
        # Each expert of a token has its own copy of it, and its own output.
        copies = tokens_at_experts(architecture, mesh)
        width += 2 * copies * architecture.experts_per_token * architecture.hidden_size
        # A gated MLP has gate, up and their product, another one the input of its activation and
        # its output.
        mlp = copies * len(architecture.mlp_projections) * architecture.active_width // parts
    # The steps of a gelu are in float32; those of a silu are fused into the products.
    is_silu = getattr(architecture, "activation", "") == "silu"
    mlp_itemsize = role.itemsize if is_silu else _FLOAT32
    return tokens * (width * role.itemsize + mlp * mlp_itemsize)
