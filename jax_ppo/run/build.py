"""Build a PPO run: from options to the parts that stay the same from step to step."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.config.schema import Config, Data, Reward, RolloutOptions
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.loading import (
    describe_tools,
    load_environment_class,
    make_environment,
    try_first_reset,
)
from jax_ppo.errors import UserError, counted
from jax_ppo.memory.decoding_slots import count_decoding_slots
from jax_ppo.memory.memory_check import PPOMemory, validate_memory
from jax_ppo.ppo import plugin_trials
from jax_ppo.ppo.advantages import figures_read
from jax_ppo.ppo.mini_batches import RolloutPacker
from jax_ppo.ppo.rewarding import RuleScorer
from jax_ppo.ppo.step_parts import StepOptions, make_engine, make_stop_search, sampling_options
from jax_ppo.registries import ROLLOUT_ENGINES
from jax_ppo.rewards import reward_functions, row_rules
from jax_ppo.rewards.custom import BatchFunction, validate_columns
from jax_ppo.rewards.samples import RewardFunction
from jax_ppo.rewards.worker_pool import RewardThreads, RewardWorkers, isolate
from jax_ppo.run.life_cycle import count_steps
from jax_ppo.run.parts import PPORun, batches_in_order
from jax_ppo.run.rule_trial import try_first_rows
from jax_ppo.run.run_examples import chat_template, load_examples, tokenize_run_prompts
from jax_ppo.run.run_models import Report, RunModels, read_run_models, validate_run_models
from jax_ppo.runtime import heartbeat, meshes
from jax_ppo.runtime.devices import read_memory_limit
from jax_ppo.sampler.built_in import resolve_engine
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.training.random_streams import SampleKeys
from jax_ppo.training.roles import RunRole, resolve_roles
from jax_ppo.training.state import StateBuilder, policy_params
from jax_ppo.types import Example

RunRule = RewardFunction | BatchFunction | RewardWorkers | None  # `None`: a model's score alone


class _RunRows(NamedTuple):
    """The rows that a run reads, what scores them, and what makes their environment."""

    examples: list[Example]
    held_out: list[Example]
    rule: RunRule
    model_weight: float
    environment_class: Callable[..., Any] | None


@heartbeat.activity("preparing the run")
def build_run(
    config: Config,
    workdir: Path,
    mesh: Mesh,
    report: Report,
    trains: bool = True,
    given: GivenResponses | None = None,
) -> PPORun:
    """Build the parts of a run, cheap validation first; weights are not loaded.

    Without `trains` no training data are read. `given` responses, to score or to train on, take the
    place of training prompts. `report` is called with lines for the user. Raise `UserError` if an
    option does not fit the data, the models or the machine.
    """
    roles = resolve_roles(config)
    # 1. Data, rules and plugins: nothing of a model is read yet.
    rows = _read_rows(config, roles, mesh, report, trains, given)
    engine_class = resolve_engine(config.rollout.engine)
    rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)

    # 2. Folders, architectures and tokenizers of the roles.
    prompts_are_chats = not isinstance((rows.examples or rows.held_out)[0].prompt, str)
    with heartbeat.activity("reading models' descriptions"):
        models = read_run_models(config, roles, mesh, report, prompts_are_chats)
    if models.reward_inputs is not None:
        models.reward_inputs.validate_chats([*rows.examples, *rows.held_out])
    validate_run_models(roles, models, config.sequence_length, mesh, rollout_mesh)
    memory = PPOMemory(config, models.nets, mesh, models.folders)
    if trains:
        validate_memory(memory)

    # 3. Prompts as tokens, which fix the number of steps.
    training, held_out, environment = _build_prompts(
        config.data, config.rollout.multi_turn, models, rows, given
    )
    total_steps = 0
    if trains:
        steps_per_epoch = batches_in_order(config.data, config.seed, training).steps_per_epoch
        total_steps = count_steps(config.trainer, steps_per_epoch)

    # 4. How the engine samples.
    sampling, held_out_sampling = _sampling_options(
        memory, rollout_mesh, models, environment, report
    )
    states = StateBuilder(config, models.nets, mesh)
    run = PPORun(
        step_options=StepOptions(config),
        states=states,
        mesh=mesh,
        folders=models.folders,
        nets=models.nets,
        tokenizer=models.tokenizer,
        training=training,
        held_out=held_out,
        total_steps=total_steps,
        engine=_build_engine(
            engine_class, config.rollout, config.sequence_length, models, states, rollout_mesh
        ),
        sampling=sampling,
        reads_rollout=models.reward_inputs is None,
        held_out_sampling=held_out_sampling,
        sample_keys=SampleKeys(config.seed, mesh),
        packer=RolloutPacker(config, mesh, has_critic=models.nets.critic is not None),
        rules=RuleScorer(
            mesh=mesh,
            tokenizer=models.tokenizer,
            options=config.reward,
            rule=rows.rule,
            model_weight=rows.model_weight,
            reward_inputs=models.reward_inputs,
            environment=environment,
            figures=figures_read(config.algorithm.adv_estimator),
        ),
    )
    if trains:
        _report_size(run, report)
    return run


def _read_rows(
    config: Config,
    roles: Sequence[RunRole],
    mesh: Mesh,
    report: Report,
    trains: bool,
    given: GivenResponses | None,
) -> _RunRows:
    """Read the rows, and try the rule and the plugins on them."""
    samples_data = trains and given is None
    with heartbeat.activity("reading data"):
        examples, held_out = load_examples(config.data, config.seed, trains=samples_data)
    if given is not None:
        # Rules are resolved for one row of each source.
        examples = list({row.data_source: row for row in given.examples}.values())
    if trains:
        for note in validation.train_notes(config):
            report(f"note: {note}")
    offloads = [name for role in roles if role.is_used for name in role.offloads]
    if offloads and mesh.devices.flat[0].platform == "cpu":
        names = " and ".join(offloads)
        report(f"note: {names}: saves nothing on a CPU, whose devices use the host's memory")
    model_weight = reward_functions.model_weight(config.reward)
    # Rewards in the rows leave rules to evaluations; an environment's may be the only ones.
    ruled = [*(() if given is not None and given.has_rewards else examples), *held_out]
    rule = None
    if ruled and not config.rewards_by_environment_alone:
        rule = _resolve_rule(config.reward, ruled)
    if isinstance(rule, RewardThreads):
        report(
            "note: the reward function runs in this process: a call that exceeds "
            f"config.reward.timeout={config.reward.timeout:g} counts as failed, but cannot be ended"
        )
    if rule is not None and samples_data:
        for line in try_first_rows(examples, config.reward):
            report(f"warning: {line}")
    # Plugins that cannot be loaded, or fail, raise here.
    has_figures = given is None and not config.selects_samples
    plugin_trials.try_plugins(config.algorithm, config.actor, config.rollout.n, has_figures)
    environment_class = load_environment_class(config.rollout.multi_turn)
    if note := try_first_reset(environment_class, (examples or held_out)[0]):
        report(f"note: {note}")
    examples = describe_tools(environment_class, examples)
    held_out = describe_tools(environment_class, held_out)
    return _RunRows(examples, held_out, rule, model_weight, environment_class)


def _build_prompts(
    data: Data,
    multi_turn: MultiTurn,
    models: RunModels,
    rows: _RunRows,
    given: GivenResponses | None,
) -> tuple[PromptDataset, PromptDataset | None, HostEnvironment | None]:
    """Return training prompts or `given` responses, held-out prompts, and their environment.

    With an environment, their rows are numbered throughout.
    """
    with heartbeat.activity("tokenizing prompts"):
        sampled = rows.examples if given is None else []
        training, held_out = tokenize_run_prompts(data, models.tokenizer, sampled, rows.held_out)
    if given is not None:
        training = given
    if rows.environment_class is None:
        return training, held_out, None
    training = dataclasses.replace(training, first_row=0)
    examples = list(training.examples)
    if held_out is not None:
        held_out = dataclasses.replace(held_out, first_row=len(training))
        examples += held_out.examples
    environment = make_environment(
        rows.environment_class, multi_turn, models.tokenizer, examples, chat_template(data)
    )
    return training, held_out, environment


def _build_engine(
    engine_class: Callable[..., RolloutEngine],
    options: RolloutOptions,
    max_length: int,
    models: RunModels,
    states: StateBuilder,
    rollout_mesh: Mesh,
) -> RolloutEngine:
    """Return the engine of a run; it gets shapes, `update_weights` brings weights at each step."""
    if ROLLOUT_ENGINES.lookup(options.engine).is_external:
        engine_class = functools.partial(
            engine_class, options=options, folder=models.folders.actor, max_length=max_length
        )
    params = policy_params(models.nets, states.shapes())
    return make_engine(engine_class, models.nets.actor, params, states.mesh, rollout_mesh)


def _resolve_rule(options: Reward, examples: list[Example]) -> RunRule:
    """Return the reward function or its worker processes; `None` if a model's score is all."""
    # Without a user-defined function or terms, a reward model replaces the built-in rule.
    if not reward_functions.has_rules(options):
        return None
    # Resolved here even if workers import it again: errors should surface before a run starts.
    rule = reward_functions.resolve_reward_function(options)
    validate_columns(rule, examples)
    if not reward_functions.scores_any_row(options):
        row_rules.validate_data_sources(examples, options)
        if missing := row_rules.find_missing_package(examples, options):
            raise UserError(missing)
    return isolate(rule, options, reward_functions.needs_workers(examples, options))


def _report_size(run: PPORun, report: Report) -> None:
    config = run.config
    trained = [role for role in run.states.roles if role.is_used and role.is_trained]
    optims = {role.name: role.trained_with.optim for role in trained}
    for note in validation.note_long_warmups(run.total_steps, config.trainer.critic_warmup, optims):
        report(f"note: {note}")
    names_by_size = collections.defaultdict[str, list[str]](list)
    # With adapters, the size of those alone.
    for name, tree in run.states.shapes().models.items():
        size = sum(leaf.size for leaf in jax.tree.leaves(tree))
        units = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
        unit, word = next((x for x in units if size >= 0.9995 * x[0]), units[-1])
        names_by_size[f"{size / unit:.3g} {word}"].append(name)
    sizes = ", ".join(f"{size} ({', '.join(names)})" for size, names in names_by_size.items())
    batch_size = config.data.train_batch_size
    epochs = run.total_steps * batch_size / max(len(run.training), 1)
    report(
        f"{len(run.training)} training and {len(run.held_out or ())} held-out prompts, "
        f"{counted(run.total_steps, 'step')} of {batch_size} x "
        f"{config.rollout.n} ({epochs:.3g} epochs)\nparameters: {sizes}"
    )


def _sampling_options(
    memory: PPOMemory,
    rollout_mesh: Mesh,
    models: RunModels,
    environment: HostEnvironment | None,
    report: Report,
) -> tuple[SamplingOptions, SamplingOptions]:
    """Return the engine's options for training and for evaluations."""
    config, rollout = memory.config, memory.config.rollout
    architecture = models.nets.actor.architecture
    tokenizer = models.tokenizer
    build = functools.partial(
        sampling_options,
        rollout,
        max_response_length=config.data.max_response_length,
        # config.json may name only the end of a text, and the tokenizer only that of a chat turn. A
        # response ends at either.
        eos_ids=(*architecture.eos_ids, tokenizer.eos_token_id),
        stop=make_stop_search(rollout, tokenizer, architecture.vocab_size),
        environment=environment,
    )
    replays = config.actor.router_replay.mode == "R3"
    sampling = dataclasses.replace(build(rollout), returns_routed_experts=replays)
    held_out = build(rollout.val_kwargs)
    is_external = ROLLOUT_ENGINES.lookup(rollout.engine).is_external
    limit = None if is_external else read_memory_limit()  # its samples are in another memory
    slots = count_decoding_slots(memory, rollout_mesh, sampling, limit)  # they change no sample
    if not rollout.max_num_seqs and limit is not None:
        report(f"rollout.max_num_seqs: {slots} samples are decoded at once on a device")
    return dataclasses.replace(sampling, slots=slots), dataclasses.replace(held_out, slots=slots)
