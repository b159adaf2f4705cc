"""Choose how many samples a device decodes at once, from the memory that the weights leave."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ppo.config.schema import Data, RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.samples.source import BATCHES_IN_POOL
from jax_ppo.runtime import distributed, meshes
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.routing import routing_bytes
from jax_ppo.sampler.slots import Cache, DecodeJob, initial_state, pad_queue
from jax_ppo.types import Prompts

FALLBACK_SLOTS = 256  # where the platform does not report its memory, as on CPUs
# Share of the memory for what the arithmetic omits: prefill, activations, fragmentation.
_RESERVE = 0.15
# Larger numbers are rounded down to a multiple of this, which accelerators decode efficiently.
_MULTIPLE = 8


def count_decoding_slots(
    run: PPOMemory, rollout_mesh: Mesh, sampling: SamplingOptions, limit: float | None
) -> int:
    """Return `rollout.max_num_seqs` or, if automatic, how many slots' caches fit everywhere.

    A device has `limit` bytes; `None` if that is unknown. Raise `UserError` if the slots that are
    set need more.
    """
    config, actor = run.config, run.nets.actor
    wanted = config.rollout.max_num_seqs
    if limit is None:
        return wanted or FALLBACK_SLOTS
    least = run.measure()
    resident = least.separate or least.resident + least.decoding
    prompts = config.data.train_batch_size
    if config.rollout.max_staleness > 1:
        prompts *= BATCHES_IN_POOL
    queue = meshes.rows_per_shard(rollout_mesh, prompts) * config.rollout.n
    # The previous step's record stays until that step is reported.
    if sampling.returns_routed_experts:
        resident += 2 * routing_bytes(actor.architecture, queue, config.sequence_length)

    def slot_bytes(slots: int) -> int:
        """Return the bytes per device of the cache and the logits of a queue's slots."""
        options = dataclasses.replace(sampling, slots=slots)
        queues = queue_cache_shapes(config.data, config.rollout, actor, rollout_mesh, options)
        cache = max(cache_bytes_per_device(caches, rollout_mesh) for caches in queues)
        # Drawing a token sorts or masks a second copy of the float32 logits.
        arrays = 3 if options.min_new_tokens else 2
        logits = arrays * slots * actor.architecture.vocab_size * 4
        # The vocabulary is split over `model`.
        return cache + logits // rollout_mesh.shape["model"]

    # The bytes grow by the same amount with each slot after the first.
    first_slot: float = slot_bytes(1)
    per_slot = (slot_bytes(queue) - first_slot) / (queue - 1) if queue > 1 else first_slot
    left = limit * (1 if wanted else 1 - _RESERVE) - resident - (first_slot - per_slot)
    # Every process compiles the same program, or refuses it.
    slots = min(distributed.allgather_json(min(max(int(left // per_slot), 1), queue)))
    if wanted:
        if slots < min(wanted, queue):
            raise UserError(
                f"config.rollout.max_num_seqs={wanted}: a device has memory for at most {slots}"
            )
        return wanted
    if slots > _MULTIPLE and slots < queue:
        slots -= slots % _MULTIPLE
    return slots


def queue_cache_shapes(
    data: Data,
    rollout: RolloutOptions,
    actor: Transformer,
    rollout_mesh: Mesh,
    sampling: SamplingOptions,
) -> list[tuple[Cache, Cache]]:
    """Return the shapes of the caches of slots and prefilled prompts, of each queue.

    `rollout.exact` has a second queue, of responses that continue; partial rollouts have it alone.
    """
    count, width = data.train_batch_size, data.max_prompt_length
    queues = [] if rollout.max_staleness > 1 else [(count, width, sampling)]
    if rollout.max_staleness > 1 or rollout.exact:
        # Each sample has its own prompt, of all tokens of prompt and response but the last.
        batches = BATCHES_IN_POOL if rollout.max_staleness > 1 else 1
        continued = dataclasses.replace(sampling, n=1, max_response_length=1)
        longest = width + data.max_response_length - 1
        queues.append((count * batches * sampling.n, longest, continued))
    model = actor.clone(unrolled=True, remat=False)
    caches = []
    for count, width, options in queues:
        rows = meshes.rows_per_shard(rollout_mesh, count)
        prompts = Prompts(
            tokens=jax.ShapeDtypeStruct((rows, width), jnp.int32),
            lengths=jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        # Key-value heads are copied until the mesh in context can split them. An abstract mesh
        # must have as many devices as the one before.
        with jax.set_mesh(rollout_mesh):
            make_caches = functools.partial(_make_caches, model, options)
            caches.append(jax.eval_shape(make_caches, prompts))
    return caches


def _make_caches(
    model: Transformer, options: SamplingOptions, prompts: Prompts
) -> tuple[Cache, Cache]:
    N = len(prompts.lengths) * options.n
    queue = pad_queue(options, prompts, N)
    job = DecodeJob(
        model=model, options=options, params={}, prompts=queue, keys_N=jnp.zeros(N), count=N
    )
    state = initial_state(job)
    return state.slots.cache, state.prefill_buffer


def cache_bytes_per_device(caches: tuple[Cache, Cache], mesh: Mesh) -> int:
    """Return the bytes per device of the caches of a queue; heads are split over `model`."""
    size = sum(int(x.size) * int(x.dtype.itemsize) for x in jax.tree.leaves(caches))
    return size // int(mesh.shape["model"])
