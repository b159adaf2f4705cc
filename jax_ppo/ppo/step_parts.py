"""What a PPO step computes with: options, models, and the engine that samples."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jax.sharding import Mesh

from jax_ppo.config.parsing import parse_strings
from jax_ppo.config.rollout_options import Sampling
from jax_ppo.config.schema import Config, RolloutOptions
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.data.tokenizer import token_bytes
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import ForwardOptions
from jax_ppo.ppo.mini_batches import RolloutPacker
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import ExperienceOptions
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.engine import Environment, RolloutEngine, SamplingOptions
from jax_ppo.sampler.other_mesh import OtherMeshEngine, SeparateEngine
from jax_ppo.sampler.text_search import TextSearch, search_for
from jax_ppo.training.networks import Networks
from jax_ppo.training.random_streams import SampleKeys
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Params, Prompts


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a step: all, and those that are static arguments of its compiled functions."""

    config: Config

    @functools.cached_property
    def forward(self) -> ForwardOptions:
        """Return the options of the forward passes."""
        return ForwardOptions.from_config(self.config)

    @functools.cached_property
    def experience(self) -> ExperienceOptions:
        """Return the options of `estimate_experience`."""
        config = self.config
        return ExperienceOptions(
            algorithm=config.algorithm,
            reward=config.reward,
            teacher=config.teacher,
            max_response_length=config.data.max_response_length,
            responses_per_prompt=config.responses_per_prompt,
            has_critic=config.has_critic,
            whitens_advantages=config.whitens_advantages,
            normalizes_values=config.critic.normalize_values,
        )

    @functools.cached_property
    def update(self) -> UpdateOptions:
        """Return the options of the update."""
        return UpdateOptions.from_config(self.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a step that stay the same from step to step; what changes is in `TrainState`."""

    step_options: StepOptions
    mesh: Mesh
    nets: Networks  # each role's model
    engine: RolloutEngine  # generates responses, with the parameters that `policy_params` returns
    sampling: SamplingOptions  # how it samples for training (`rollout`)
    total_steps: int  # number of steps of the whole run; 0 where nothing is trained
    # Whether a reward model, if any, reads the sampled tokens: other inputs have unknown shapes.
    reads_rollout: bool

    training: PromptDataset  # the prompts that the actor is trained on
    sample_keys: SampleKeys  # the random keys of samples
    packer: RolloutPacker
    rules: RuleScorer

    @property
    def config(self) -> Config:
        """Return all options."""
        return self.step_options.config

    @property
    def samples(self) -> int:
        """Return the number of samples that a step learns from."""
        return self.config.data.train_batch_size * self.config.responses_per_prompt

    def place_prompts(self, prompts: Prompts) -> Prompts:
        """Return the prompts on the mesh, their rows split if the devices divide them."""
        return placement.place(prompts, sharding.batch_rows(self.mesh, len(prompts.lengths)))

    def policy_params(self, state: TrainState) -> Params:
        """Return the parameters that the policy samples with."""
        return policy_params(self.nets, state)


class StepObserver(Protocol):
    """Follows what the host does in a step."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time counts for a phase."""

    def write_pending_report(self) -> None:
        """Write what is pending; called where the mesh works and the host has time."""


def make_engine(
    engine_class: Callable[..., RolloutEngine],
    actor: Transformer,
    params: Params,
    mesh: Mesh,
    rollout_mesh: Mesh,
) -> RolloutEngine:
    """Return the engine that samples from the actor, on a separate mesh if it has one."""
    if not meshes.shares_devices(mesh, rollout_mesh):
        built_in = BuiltInEngine(rollout_mesh, actor, params, trained_on=mesh)
        return SeparateEngine(built_in, mesh=rollout_mesh, run_mesh=mesh)
    engine = engine_class(mesh=rollout_mesh, actor=actor, params=params)
    if rollout_mesh == mesh:
        return engine
    return OtherMeshEngine(engine, mesh=rollout_mesh, run_mesh=mesh)


def make_stop_search(options: RolloutOptions, tokenizer: Any, vocab_size: int) -> TextSearch | None:
    """Return the search for `rollout.stop` or `None`; raise `UserError` if it is impossible."""
    strings = parse_strings(options.stop)
    if not strings:
        return None
    tokens = token_bytes(tokenizer, f"config.rollout.stop={strings}", strings)[:vocab_size]
    return search_for(strings, tokens, vocab_size)


def sampling_options(
    rollout: RolloutOptions,
    options: Sampling,
    max_response_length: int,
    eos_ids: Iterable[int | None],
    stop: TextSearch | None = None,
    environment: Environment | None = None,
) -> SamplingOptions:
    """Return the engine's options for `rollout` or `rollout.val_kwargs`.

    Repeated `eos_ids` and `None` are left out; `stop` is from `make_stop_search`.
    """
    partial_length = None
    if rollout.max_staleness > 1:
        partial_length = rollout.partial_length or max(1, max_response_length // 8)
    return SamplingOptions(
        max_response_length=max_response_length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        n=options.n,
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        slots=rollout.max_num_seqs or None,
        partial_length=partial_length,
        min_new_tokens=rollout.min_new_tokens,
        stop=stop,
        environment=environment,
        max_turns=rollout.multi_turn.max_assistant_turns,
        max_turn_length=rollout.multi_turn.max_turn_length,
    )
