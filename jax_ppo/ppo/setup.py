"""The parts of a PPO run that stay the same from step to step; what changes is in `TrainState`."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config import notes
from jax_ppo.config.parsing import parse_logit_bias
from jax_ppo.config.schema import (
    Config,
    Critic,
    Data,
    Reward,
    RolloutOptions,
    option_value,
)
from jax_ppo.data import prompts as prompts_lib
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.prompts import PromptBatch, PromptBatches, PromptDataset
from jax_ppo.data.sources import source_weights
from jax_ppo.environments.loading import load_environment_class
from jax_ppo.errors import UserError
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import advantages, kl_estimators, objectives
from jax_ppo.ppo.cached_prompts import cache_training_prompts, load_run_examples
from jax_ppo.ppo.curriculum import CurriculumBatches, SolveRates
from jax_ppo.ppo.decoding_slots import count_decoding_slots
from jax_ppo.ppo.environment_rows import set_up_environment
from jax_ppo.ppo.memory_check import validate_memory
from jax_ppo.ppo.plans import RolloutPlanner, make_planner
from jax_ppo.ppo.random_keys import SampleKeys
from jax_ppo.ppo.reward_inputs import make_reward_inputs
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.ppo.role_folders import resolve_role_folders
from jax_ppo.ppo.rollout_engine import make_engine, make_searches, sampling_options
from jax_ppo.rewards import registry
from jax_ppo.rewards.batch_functions import BatchFunction
from jax_ppo.rewards.judge import Judge
from jax_ppo.rewards.samples import RewardFunction
from jax_ppo.rewards.worker_pool import RewardWorkers, count_workers
from jax_ppo.runtime import meshes, placement, sharding, work_directory
from jax_ppo.sampler.built_in import resolve_engine
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.sampler.environment import Environment
from jax_ppo.supervised import warmup
from jax_ppo.training.networks import (
    Folders,
    Networks,
    describe_attention,
    packed_row_length,
    read_networks,
)
from jax_ppo.training.setup import (
    count_steps,
    load_model_tokenizer,
    validate_model,
)
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.types import Example, Params, Prompts

Report = Callable[[str], None]  # takes a line for the user
OFFLOADS = (
    "actor.optimizer_offload",
    "critic.optimizer_offload",
    "critic.param_offload",
    "algorithm.reference_offload",
    "reward.param_offload",
)


@dataclasses.dataclass(frozen=True)
class PPORun:
    """The parts of a run.

    Attributes:
      config: all options.
      mesh: the run's mesh.
      folders: each role's checkpoint.
      nets: each role's model.
      tokenizer: the actor's.
      training: the prompts that the actor is trained on.
      held_out: the prompts of evaluations; `None` without validation files.
      total_steps: number of steps of the whole run.
      engine: generates responses, with the parameters that `policy_params` returns.
      sampling: how it samples for training (`rollout`).
      held_out_sampling: how it samples in evaluations (`rollout.val_kwargs`).
      sample_keys: the random keys of samples.
      planner: plans how rollouts are packed.
      rules: scores responses.
    """

    config: Config
    mesh: Mesh
    folders: Folders
    nets: Networks
    tokenizer: Any
    training: PromptDataset
    held_out: PromptDataset | None
    total_steps: int
    engine: RolloutEngine
    sampling: SamplingOptions
    held_out_sampling: SamplingOptions
    sample_keys: SampleKeys
    planner: RolloutPlanner
    rules: RuleScorer

    def batches(
        self, position: int, solve_rates: SolveRates | None = None
    ) -> PromptBatches | CurriculumBatches:
        """Return the training batches that follow a position.

        Args:
          position: examples consumed.
          solve_rates: those at that position, for `data.curriculum`, which updates them in place.
            `None` follows the order of the data.
        """
        data = self.config.data
        if data.curriculum == "none" or solve_rates is None:
            return _training_batches(self.config, self.training, position)
        return CurriculumBatches(
            dataset=self.training,
            batch_size=data.train_batch_size,
            seed=self.config.seed,
            position=position,
            solve_rates=solve_rates,
        )

    def held_out_batches(self) -> Iterator[PromptBatch]:
        """Return the batches of an evaluation."""
        assert self.held_out is not None, "there are no validation files"
        return prompts_lib.evaluation_batches(self.held_out, self.config.data.val_batch_size)

    def place_prompts(self, prompts: Prompts) -> Prompts:
        """Return the prompts on the mesh, their rows split if the devices divide them."""
        return placement.place(prompts, sharding.batch_rows(self.mesh, len(prompts.lengths)))

    def policy_params(self, state: TrainState) -> Params:
        """Return the parameters that the policy samples with."""
        return policy_params(self.nets, state)


def set_up_run(
    config: Config, workdir: Path, mesh: Mesh, report: Report, trains: bool = True
) -> PPORun:
    """Build the parts of a run, cheap checks first; weights are not loaded.

    Args:
      config: all options.
      workdir: the run's folder.
      mesh: the run's mesh.
      report: called with lines for the user.
      trains: whether there will be steps of training, and not only evaluations.

    Raises:
      UserError: an option does not fit the data, the models or the machine.
    """
    # 1. Data, rules and plugins: nothing of a model is read yet.
    training, held_out = load_run_examples(config)
    _report_notes(config, mesh, report, trains)
    _reject_weights_with_curriculum(config.data)
    model_weight = registry.model_weight(config.reward)
    rule = None
    if not config.rewards_by_environment_alone:
        rule = _resolve_rule(config.reward, [*training, *held_out])
    # Plugins are imported before models are read.
    objectives.get_policy_loss(config.actor.policy_loss)
    advantages.load_estimator(config.algorithm.adv_estimator)
    kl_estimators.load_kl_estimators(config)
    environment_class = load_environment_class(config.rollout.multi_turn)
    engine_class = resolve_engine(config.rollout.engine)
    rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)

    # 2. Folders, architectures and tokenizers of the roles.
    def make_model(folder: Path) -> None:
        warmup.make_model(config, folder, mesh, report)
        work_directory.share_with_all(workdir, folder.name)

    folders = resolve_role_folders(config, workdir, make_model)
    nets = read_networks(config, folders)
    tokenizer = load_model_tokenizer(config.model, folders.actor)
    report(
        describe_attention(
            config.model,
            nets.actor,
            packed_row_length(config),
            decodes=config.rollout.engine == "built-in",
        )
    )
    reward_inputs = None
    if nets.reward is not None and folders.reward is not None:
        reward_inputs = make_reward_inputs(
            options=config.reward,
            packed=config.packing.enabled,
            mesh=mesh,
            net=nets.reward,
            folder=folders.reward,
            actor_tokenizer=tokenizer,
            report=report,
            prompts_are_chats=not isinstance(training[0].prompt, str),
        )
    # A reward model with its own tokenizer was checked where its inputs were set up.
    reward = nets.reward if reward_inputs is None else None
    token_readers = {"actor": nets.actor, "critic": nets.critic, "reward model": reward}
    _validate_models(token_readers, mesh, tokenizer, config.sequence_length)
    meshes.validate_architecture(
        rollout_mesh, nets.actor.architecture, option="config.rollout.mesh"
    )
    _validate_critic_tokenizer(config.critic, folders, tokenizer)
    if trains:
        validate_memory(config, folders, nets, mesh)

    # 3. Prompts as tokens, which fix the number of steps.
    if config.data.cache_dir:
        training_prompts = cache_training_prompts(config, folders.actor)
    else:
        training_prompts = _tokenize(config.data, training, tokenizer, "config.data.train_files")
    held_out_prompts = None
    if held_out:
        held_out_prompts = _tokenize(config.data, held_out, tokenizer, "config.data.val_files")
    environment = None
    if environment_class is not None:
        training_prompts, held_out_prompts, environment = set_up_environment(
            environment_class,
            config.rollout.multi_turn,
            tokenizer,
            training_prompts,
            held_out_prompts,
            rollout_mesh,
        )
    steps_per_epoch = _training_batches(config, training_prompts, position=0).steps_per_epoch
    total_steps = count_steps(config.trainer, steps_per_epoch)
    long_warmup = notes.note_long_warmup(config, total_steps)
    if long_warmup is not None and trains:
        report(f"note: {long_warmup}")

    # 4. How the engine samples.
    sampling, held_out_sampling = _sampling_options(config, nets, tokenizer, environment)
    slots = count_decoding_slots(config, nets, mesh, rollout_mesh, sampling)
    if not config.rollout.max_num_seqs:
        report(f"rollout.max_num_seqs: {slots} samples are decoded at once on a device")
    run = PPORun(
        config=config,
        mesh=mesh,
        folders=folders,
        nets=nets,
        tokenizer=tokenizer,
        training=training_prompts,
        held_out=held_out_prompts,
        total_steps=total_steps,
        engine=make_engine(engine_class, config, nets, mesh, rollout_mesh),
        sampling=dataclasses.replace(sampling, slots=slots),
        held_out_sampling=dataclasses.replace(held_out_sampling, slots=slots),
        sample_keys=SampleKeys(config.seed, mesh),
        planner=make_planner(config, mesh, has_critic=nets.critic is not None),
        rules=RuleScorer(
            mesh=mesh,
            tokenizer=tokenizer,
            options=config.reward,
            rule=rule,
            model_weight=model_weight,
            reward_inputs=reward_inputs,
            environment=environment,
        ),
    )
    if trains:
        report(
            f"{len(run.training)} training and {len(run.held_out or ())} held-out prompts, "
            f"{run.total_steps} steps of {config.data.train_batch_size} prompts x "
            f"{config.rollout.n}"
        )
    return run


def _report_notes(config: Config, mesh: Mesh, report: Report, trains: bool) -> None:
    """Report options that are valid, but unlikely to do what they seem to."""
    for note in notes.train_notes(config) if trains else ():
        report(f"note: {note}")
    offloads = [name for name in OFFLOADS if option_value(config, name)]
    if offloads and mesh.devices.flat[0].platform == "cpu":
        names = " and ".join(offloads)
        report(f"note: {names}: saves nothing, as the memory of CPU devices is the host's")


def _reject_weights_with_curriculum(data: Data) -> None:
    """Raise `UserError` for weighted sources of prompts that are drawn by their solve rates."""
    is_weighted = source_weights(data.train_files, "config.data.train_files") is not None
    if is_weighted and data.curriculum != "none":
        raise UserError(
            f"config.data.curriculum={data.curriculum!r}: draws prompts by their solve "
            "rates; give the sources of config.data.train_files no weights"
        )


def _sampling_options(
    config: Config, nets: Networks, tokenizer: Any, environment: Environment | None
) -> tuple[SamplingOptions, SamplingOptions]:
    """Return the engine's options for training and for evaluations."""
    architecture = nets.actor.architecture
    _validate_biased_tokens(config.rollout, architecture.vocab_size)
    # config.json may name only the end of text and the tokenizer the end of a chat turn: a
    # response ends at either.
    eos_ids = (*architecture.eos_ids, tokenizer.eos_token_id)
    searches = make_searches(config.rollout, tokenizer, architecture.vocab_size)
    training, held_out = (
        sampling_options(config, options, eos_ids, searches, environment)
        for options in (config.rollout, config.rollout.val_kwargs)
    )
    return training, held_out


def _resolve_rule(
    options: Reward, examples: list[Example]
) -> RewardFunction | BatchFunction | RewardWorkers | None:
    """Return the reward function or the worker processes that apply it.

    Returns `None` if a reward model is the only reward.
    """
    # Without a user-defined function or terms, a reward model replaces the built-in rule.
    if not registry.has_rules(options):
        return None
    # Resolved here even if workers import it again: errors should surface before a run starts.
    judge = Judge.from_options(options)
    rule = registry.resolve_reward_function(
        options.function, options.gsm8k_method, options.terms, judge
    )
    # A judge that is the whole reward scores rows of any source.
    if judge is None or options.terms:
        registry.validate_data_sources(examples, options.function, options.terms)
    workers = count_workers(options, registry.needs_workers(examples, options))
    if not workers:
        return rule
    takes_batches = isinstance(rule, BatchFunction)
    return RewardWorkers(options, 1 if takes_batches else workers, takes_batches)


def _validate_models(
    models: Mapping[str, Transformer | Deberta | None],
    mesh: Mesh,
    tokenizer: Any,
    sequence_length: int,
) -> None:
    """Validate every model that reads the actor's tokens; `models` holds them by role."""
    for role, net in models.items():
        if net is not None:
            assert not isinstance(net, Deberta), "encoders have tokenizers of their own"
            validate_model(role, mesh, net.architecture, tokenizer, sequence_length)


def _validate_biased_tokens(options: RolloutOptions, vocab_size: int) -> None:
    """Raise `UserError` for a `rollout.logit_bias` of a token that the model does not have."""
    for token, _ in parse_logit_bias(options.logit_bias):
        if token >= vocab_size:
            raise UserError(
                f"config.rollout.logit_bias={options.logit_bias!r}: the model has no token "
                f"{token}, only 0 to {vocab_size - 1}"
            )


def _validate_critic_tokenizer(options: Critic, folders: Folders, tokenizer: Any) -> None:
    """Raise `UserError` if `critic.path` names a model of another vocabulary than the actor's."""
    path = options.path
    # A folder without a tokenizer gives nothing to compare.
    if not path or folders.critic is None or not tokenizer_lib.has_tokenizer(folders.critic):
        return
    critic_tokenizer = tokenizer_lib.load_tokenizer(
        str(folders.critic), option="config.critic.path"
    )
    if critic_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"config.critic.path={path!r}: has the tokenizer of another vocabulary; a "
            "critic reads the actor's tokens"
        )


def _tokenize(data: Data, examples: list[Example], tokenizer: Any, option: str) -> PromptDataset:
    """Return the examples with their prompts as tokens; errors name `option`."""
    return prompts_lib.tokenize_prompts(
        examples,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        chat_template=data.chat_template,
        name=option,
    )


def _training_batches(config: Config, training: PromptDataset, position: int) -> PromptBatches:
    """Return the batches that follow a position, in the order of the data or by its weights."""
    data = config.data
    return PromptBatches(
        training,
        data.train_batch_size,
        data.shuffle,
        config.seed,
        position,
        weights=source_weights(data.train_files, "config.data.train_files"),
    )
