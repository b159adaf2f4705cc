"""The programs of a PPO step from the options and the models' config.json alone."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Data
from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.response_rows import GivenResponses, ResponseRow
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.memory.decoding_slots import (
    cache_bytes_per_device,
    count_decoding_slots,
    queue_cache_shapes,
)
from jax_ppo.memory.memory_check import LeastMemory, PPOMemory
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.ppo.advantages import figures_read
from jax_ppo.ppo.mini_batches import RolloutPacker, RolloutPacking
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.ppo.samples.source import BATCHES_IN_POOL
from jax_ppo.ppo.step_parts import StepOptions, StepParts, make_engine, sampling_options
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.runtime.compiled_programs import run_on_shapes
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.decoding_weights import shape_decoding_weights
from jax_ppo.training.optimizer import split_frozen
from jax_ppo.training.random_streams import SampleKeys
from jax_ppo.training.roles import find_role, read_networks, resolve_role_folders, resolve_roles
from jax_ppo.training.state import StateBuilder, TrainState, policy_params
from jax_ppo.types import Example, Params, Prompts

# The files of a model that a plan reads; none contains weights.
DESCRIPTIONS = ["config.json", "generation_config.json"]
FLOAT32_BYTES = 4
TOTAL_STEPS = 1000  # any number will do: no shape depends on the number of steps


@dataclasses.dataclass(frozen=True)
class Role:
    """A model of a step."""

    net: Any  # a `Transformer` or a `Deberta`
    params: Params  # all parameters that it computes with
    trained: Params  # what training changes of them
    has_logits: bool  # over the vocabulary

    @property
    def architecture(self) -> Any:
        """Return the architecture of the model."""
        return self.net.architecture

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number of the computation."""
        return int(np.dtype(self.net.dtype).itemsize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractStep(StepParts):
    """A step without arrays: its parts, and shapes and shardings of its arguments."""

    state: TrainState
    prompts: Prompts  # the longest prompts that a step can have
    packed: RolloutPacking  # of a step's samples
    rollout_mesh: Mesh
    decoding_weights: Params  # the copy of the weights that decodes
    caches: Any  # shapes of the slots' cache and of the prefill buffer, of each queue
    least: LeastMemory  # bytes of weights, as the validation at the start of a run adds them up

    def batches(self) -> PromptBatches:
        """Return batches of the longest prompts."""
        return PromptBatches(self.training, self.config.data.train_batch_size)

    def role(self, name: str) -> "Role":
        """Return the model of a role, with all its parameters."""
        role = find_role(name)
        stored = self.state.models[name]
        if name == "actor":
            params = policy_params(self.nets, self.state)
        elif role.holds_base:
            params = stored
        else:
            params = self.state.role_params(name, self.nets)
        trained, _ = split_frozen(getattr(self.config, role.section, None), stored)
        return Role(role.model(self.nets), params, trained, role.has_logits)

    @property
    def is_separate(self) -> bool:
        """Return whether the devices that decode do nothing else."""
        return not meshes.shares_devices(self.mesh, self.rollout_mesh)

    @property
    def queue(self) -> int:
        """Return the number of samples in the queue of each shard of rows."""
        prompts = self.prompts.tokens.shape[0]
        samples_per_prompt = self.samples // prompts
        if self.config.rollout.max_staleness > 1:
            prompts *= BATCHES_IN_POOL
        return meshes.rows_per_shard(self.rollout_mesh, prompts) * samples_per_prompt

    @property
    def slots(self) -> int:
        """Return the number of samples that each shard of rows decodes at a time."""
        return min(self.sampling.slots or self.queue, self.queue)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes per device of the larger queue's cache."""
        # Each shard of rows has a separate queue.
        return max(cache_bytes_per_device(caches, self.rollout_mesh) for caches in self.caches)


def build_abstract_step(config: Config, mesh: Mesh, limit: float | None = None) -> AbstractStep:
    """Build the abstract programs of a step without placing anything on the mesh.

    A device has `limit` bytes, which decide an automatic `rollout.max_num_seqs`.

    Raise `UserError` if options, models, mesh and machine do not match, or config.json is missing.
    """
    folders = resolve_role_folders(resolve_roles(config), config.model, DESCRIPTIONS)
    nets = read_networks(config, folders, needs_weights=False)
    for net in nets.values():
        if not isinstance(net, Deberta):
            meshes.validate_architecture(mesh, net.architecture)
    architecture = nets.actor.architecture
    rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)
    meshes.validate_architecture(rollout_mesh, architecture, option="config.rollout.mesh")
    data, rollout = config.data, config.rollout
    sampling = dataclasses.replace(
        sampling_options(rollout, rollout, data.max_response_length, architecture.eos_ids),
        returns_routed_experts=config.actor.router_replay.mode == "R3",
    )
    memory = PPOMemory(config, nets, mesh)
    slots = rollout.max_num_seqs or count_decoding_slots(memory, rollout_mesh, sampling, limit)
    sampling = dataclasses.replace(sampling, slots=slots)
    state = StateBuilder(config, nets, mesh).shapes()
    sampled_params = policy_params(nets, state)
    reads_rollout = not isinstance(nets.reward, Deberta)  # an encoder reads its own tokens
    packer = RolloutPacker(config, mesh, has_critic=nets.critic is not None)
    count = data.train_batch_size
    samples = count * config.responses_per_prompt
    training = _longest_examples(data, config.learns_from_files)
    ones = np.ones(samples, np.int32)
    with run_on_shapes():
        prompts = placement.place(
            Prompts(tokens=np.stack(training.tokens), lengths=ones[:count]),
            sharding.batch_rows(mesh, count),
        )
        packed = packer.pack(0, ones)  # a packing has one shape for all lengths
    return AbstractStep(
        step_options=StepOptions(config),
        mesh=mesh,
        nets=nets,
        engine=make_engine(BuiltInEngine, nets.actor, sampled_params, mesh, rollout_mesh),
        sampling=sampling,
        total_steps=config.trainer.total_training_steps or TOTAL_STEPS,
        reads_rollout=reads_rollout,
        state=state,
        training=training,
        sample_keys=SampleKeys(config.seed, mesh),
        packer=packer,
        rules=RuleScorer(
            mesh=mesh,
            tokenizer=None,
            options=config.reward,
            rule=None,
            model_weight=1.0,
            reward_inputs=None,
            figures=figures_read(config.algorithm.adv_estimator),
        ),
        prompts=prompts,
        packed=packed,
        rollout_mesh=rollout_mesh,
        decoding_weights=shape_decoding_weights(rollout_mesh, nets.actor, sampled_params),
        caches=queue_cache_shapes(data, rollout, nets.actor, rollout_mesh, sampling),
        least=memory.measure(),
    )


def _longest_examples(data: Data, are_given: bool) -> PromptDataset:
    """Return a step's prompts of the maximum length, with such responses if these are given."""
    count, width = data.train_batch_size, data.max_prompt_length
    example = Example(prompt="", data_source="", ground_truth="")
    prompt = np.zeros(width, np.int32)
    if not are_given:
        return PromptDataset([example] * count, [prompt] * count, width)
    tokens = np.zeros(data.max_response_length, np.int32)
    row = ResponseRow(
        "", 1, example, prompt, tokens, action_mask=tokens == 0, turn_starts=tokens > 0
    )
    return GivenResponses.from_rows([row] * count, width, len(tokens))
