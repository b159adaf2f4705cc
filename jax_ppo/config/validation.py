"""Validate options against each other: incompatible sizes, and options that require others.

Names, types and ranges of single options are validated in loading.py. Each function takes the
sections that it compares and raises `UserError` at the first rule that they violate.
"""

import dataclasses
import functools
import shlex
import urllib.parse
from collections.abc import Callable, Mapping

from jax_ppo.config import parsing
from jax_ppo.config.schema import (
    LOGGERS,
    Actor,
    Algorithm,
    Config,
    Critic,
    Data,
    Distributed,
    Evaluate,
    KLControl,
    Lora,
    MeshShape,
    Model,
    MultiTurn,
    Packing,
    Reward,
    RolloutMesh,
    RolloutOptions,
    Sampling,
    Score,
    Teacher,
    Trainer,
    all_options,
    option_value,
)
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, ROLLOUT_ENGINES

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


def validate_config(config: Config, command: str) -> None:
    """Validate the options of a command; raise `UserError` on the first problem."""
    if command in RESPONSES_PER_EXAMPLE:
        _validate_supervised_config(config, command)
    else:
        _validate_ppo_config(config, command)
        command = "train"
    _validate_mesh(config.mesh, config.rollout.mesh, config.packing)
    _reject_router_loss_of_parts(
        config.mesh.context,
        actor=config.actor.router_aux_loss_coef,
        critic=config.critic.router_aux_loss_coef,
        supervised=config.supervised.router_aux_loss_coef,
    )
    _validate_processes_and_loggers(config.distributed, config.trainer)
    # Requirements come after the rules, whose messages are more specific.
    validate_requirements(config, command)


def _validate_ppo_config(config: Config, command: str) -> None:
    data, rollout, estimator = config.data, config.rollout, config.algorithm.adv_estimator
    if command == "evaluate":
        _validate_ranking(config.evaluate, rollout.val_kwargs, estimator, config.reward)
    elif command == "score":
        _require_set("score.file", config.score.file)
        _require_set("model.path", config.model.path)
        entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
        if entry.needs_greedy or entry.needs_components:
            raise UserError(
                f"config.algorithm.adv_estimator={estimator!r}: compares greedy responses or "
                "several rewards, which jax_ppo.score does not have; choose another estimator"
            )
    elif command in ("train", "critic") and not config.learns_from_files:
        # A share of given responses excludes training files; its requirement asks for the rows.
        if command == "critic" or config.teacher.on_policy_fraction == 1:
            _require_set("data.train_files", data.train_files)
    value_of = functools.partial(option_value, config)
    if config.learns_from_files:
        _require_set("model.path", config.model.path)
        _reject_what_files_lack(config.reward, config.score)
        if not config.samples_nothing:
            _require_the_teachers_loss_alone(value_of)
    _validate_batches(data, config.actor, config.critic)
    _validate_rows(config.packing, config.mesh, config.actor, config.critic, config.sequence_length)
    _validate_sampling(rollout, data)
    if ROLLOUT_ENGINES.lookup(rollout.engine).is_external:
        _validate_external_engine(rollout)
    _validate_environment(rollout.multi_turn, data.cache_dir)
    _validate_comparisons(config.algorithm, config.reward, rollout)
    if rollout.max_staleness > 1 or rollout.verify_drafts:
        _require_responses_that_continue(value_of)
    samples = data.train_batch_size * config.responses_per_prompt
    _validate_rewards(
        config.reward, config.teacher, config.algorithm.kl_ctrl, data.max_response_length, samples
    )
    _validate_losses(config.actor, rollout.reuse_logprobs, config.algorithm.rollout_is)
    _validate_model(config.model, data.train_files)


def _validate_supervised_config(config: Config, command: str) -> None:
    _require_set("data.train_files", config.data.train_files)
    # Only PPO creates a small model to start from, for its arithmetic data.
    _require_set("model.path", config.model.path)
    row_length = config.packing.row_length
    responses = RESPONSES_PER_EXAMPLE[command]
    longest = config.sequence_length * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )
    center_coef = config.supervised.center_coef
    if command == "sft" and center_coef:
        raise UserError(
            f"config.supervised.center_coef={center_coef}: only jax_ppo.reward_model reads it"
        )
    for name in ("rank", "path"):
        if value := getattr(config.model.lora, name):
            raise UserError(
                f"config.model.lora.{name}={value!r}: jax_ppo.{command} trains all parameters, "
                "only jax_ppo.train trains adapters; leave it unset"
            )
    if config.mesh.virtual_replicas:
        raise UserError(
            f"config.mesh.virtual_replicas={config.mesh.virtual_replicas}: jax_ppo.{command} does "
            "not divide its batches among them; leave it at 0"
        )


def validate_requirements(config: Config, command: str) -> None:
    """Raise `UserError` for a changed option whose requirements are not met."""
    for option in all_options():
        value = option_value(config, option.name)
        # Options at their defaults, or not read by this command, require nothing.
        if value == option.default or command not in option.read_by:
            continue
        for requirement in option.facts.requires:
            if not requirement.is_met(config):
                reason = requirement.message.format(config=config)
                raise UserError(f"config.{option.name}={value!r}: {reason}")


def _require_set(name: str, value: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not value:
        doc = next(option.facts.doc for option in all_options() if option.name == name)
        # The meaning of an empty value to other commands does not help here.
        meaning = doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def _require_values(
    value_of: Callable[[str], object], expected: Mapping[str, object], reason: str
) -> None:
    """Raise `UserError` for the first option, by name, that has another value than expected."""
    for name, value in expected.items():
        if (given := value_of(name)) != value:
            raise UserError(f"config.{name}={given!r}: expected {value!r} with {reason}")


def _validate_ranking(
    options: Evaluate, sampling: Sampling, estimator: str, reward: Reward
) -> None:
    """Validate what an evaluation ranks, and by what."""
    rank_by = options.rank_by
    if rank_by == "none":
        return
    setting = f"config.evaluate.rank_by={rank_by!r}"
    if sampling.n < 2:
        raise UserError(
            f"{setting}: ranks the responses to a prompt, and config.rollout.val_kwargs.n="
            f"{sampling.n}; set it to 2 or more"
        )
    if sampling.temperature == 0:
        raise UserError(
            f"{setting}: config.rollout.val_kwargs.temperature=0 gives equal responses; set it "
            "above 0"
        )
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
    if rank_by == "critic" and not entry.needs_critic:
        raise UserError(
            f"{setting}: there is no critic with config.algorithm.adv_estimator="
            f"{estimator!r}; expected 'gae'"
        )
    # The value of a whole response is that of its last token.
    if rank_by == "critic" and entry.values_turns:
        raise UserError(
            f"{setting}: with config.algorithm.adv_estimator={estimator!r} the critic learns "
            "values only where turns start; expected 'gae' or 'bi_level_gae'"
        )
    if rank_by == "reward_model" and not reward.model_path:
        raise UserError(f"{setting}: there is no reward model; set config.reward.model_path")


def _reject_what_files_lack(reward: Reward, score: Score) -> None:
    """Validate the rewards of responses that files give."""
    if reward.normalize == "reference":
        raise UserError(
            "config.reward.normalize='reference': samples responses, and config.score.file gives "
            "them; expected 'none' or 'running'"
        )
    if score.reward_key and reward.model_path:
        raise UserError(
            f"config.score.reward_key={score.reward_key!r}: the rewards are in the rows; unset "
            "config.reward.model_path, or this for the reward model's"
        )


def _require_the_teachers_loss_alone(value_of: Callable[[str], object]) -> None:
    """Validate the options, by name, of steps on the responses of other policies.

    A policy gradient would need the log-probs of the policy that wrote them. Both kinds of steps
    run the same compiled programs, so sampled responses have as many and the same arrays.
    """
    expected = {
        "data.train_files": "",
        "data.cache_dir": "",
        "data.curriculum": "none",
        "score.reward_key": "",
        "teacher.reward_coef": 0.0,
        "teacher.use_task_rewards": False,
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_is": "none",
        "algorithm.filter_groups.enable": False,
        "rollout.n": 1,
        "rollout.keep": None,
        "rollout.max_staleness": 0,
        "rollout.exact_filters": False,
        "rollout.multi_turn.environment": "",
        "actor.router_replay.mode": "disabled",
        "reward.process_rewards": False,
    }
    fraction = f"config.teacher.on_policy_fraction={value_of('teacher.on_policy_fraction')}"
    _require_values(
        value_of,
        expected,
        f"{fraction}, whose other steps have the prompts and responses of config.score.file, and "
        "the teacher's loss alone",
    )
    estimator = str(value_of("algorithm.adv_estimator"))
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
    if entry.needs_critic or entry.needs_greedy or entry.needs_components:
        raise UserError(
            f"config.algorithm.adv_estimator={estimator!r}: expected one that "
            f"needs only rewards with {fraction}, such as 'reinforce_plus_plus'"
        )


def _validate_batches(data: Data, actor: Actor, critic: Critic) -> None:
    """Validate that mini-batches divide the batch."""
    batch = data.train_batch_size
    sizes = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size}
    for name, mini_batch in sizes.items():
        if mini_batch and batch % mini_batch:
            divisors = (d for d in range(1, batch + 1) if batch % d == 0)
            nearest = min(divisors, key=lambda divisor: abs(divisor - mini_batch))
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is {nearest}"
            )


def _validate_rows(
    packing: Packing, mesh: MeshShape, actor: Actor, critic: Critic, sequence_length: int
) -> None:
    """Validate that a packed row holds the longest sample, and may hold shared prompts."""
    row_length = packing.row_length
    if row_length is not None and row_length < sequence_length:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold "
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{sequence_length} tokens; set it to that or more"
        )
    obstacles = {
        "packing.enabled=False": (not packing.enabled, "gives each sample a separate row"),
        f"mesh.context={mesh.context}": (mesh.context > 1, "splits rows by tokens"),
    }
    coefs = {"actor": actor.router_aux_loss_coef, "critic": critic.router_aux_loss_coef}
    for role, coef in coefs.items():
        obstacles[f"{role}.router_aux_loss_coef={coef}"] = (coef > 0, "is computed per sample")
    for setting, (stands, reason) in obstacles.items():
        if packing.share_prompts and stands:
            raise UserError(
                f"config.packing.share_prompts=True: config.{setting} {reason}; set one of them to "
                "its default"
            )


def _validate_sampling(rollout: RolloutOptions, data: Data) -> None:
    """Validate the draws of tokens, whichever engine makes them."""
    for name, sampling in {"rollout": rollout, "rollout.val_kwargs": rollout.val_kwargs}.items():
        if sampling.top_k == 0:
            raise UserError(f"config.{name}.top_k=0: expected -1 (all tokens) or at least 1")
    for name, parse in (
        ("stop", parsing.parse_strings),
        ("bad_words", parsing.parse_strings),
        ("logit_bias", parsing.parse_logit_bias),
    ):
        try:
            parse(getattr(rollout, name))
        except ValueError as error:
            raise UserError(f"config.rollout.{name}: {error}") from error
    if rollout.min_new_tokens > data.max_response_length:
        raise UserError(
            f"config.rollout.min_new_tokens={rollout.min_new_tokens}: must be at most "
            f"config.data.max_response_length={data.max_response_length}"
        )
    if rollout.keep is not None and rollout.keep > rollout.n:
        raise UserError(
            f"config.rollout.keep={rollout.keep}: expected at most config.rollout.n={rollout.n}"
        )


def _validate_external_engine(rollout: RolloutOptions) -> None:
    """Validate the options that an external engine cannot follow, and those that it needs."""
    entry = ROLLOUT_ENGINES.lookup(rollout.engine)
    engine = f"config.rollout.engine={rollout.engine!r}"
    for name in entry.lacks:
        if getattr(rollout, name):
            raise UserError(
                f"config.rollout.{name}={getattr(rollout, name)!r}: {engine} has no equivalent; "
                "unset it, or use the built-in engine"
            )
    if rollout.mesh.model is not None:
        raise UserError(
            f"config.rollout.mesh.model={rollout.mesh.model}: {engine} does not decode on the "
            "mesh; unset it"
        )
    if rollout.reuse_logprobs == "always":
        raise UserError(
            f"config.rollout.reuse_logprobs='always': {engine} rounds differently, so its "
            "log-probs are compared with the trainer's; set it to 'auto'"
        )
    if not entry.is_server:
        return
    if not rollout.url and not (rollout.engine == "vllm" and rollout.vllm.python):
        raise UserError(f"{engine}: needs {entry.requirement.replace('`', '')}")
    if rollout.url:
        _require_address("config.rollout.url", rollout.url, "JAX_PPO_ROLLOUT_KEY")
    try:
        shlex.split(rollout.vllm.arguments)
    except ValueError as error:
        raise UserError(
            f"config.rollout.vllm.arguments={rollout.vllm.arguments!r}: {error}"
        ) from None
    if rollout.temperature != 1 and (rollout.filters_tokens or rollout.logit_bias):
        raise UserError(
            f"config.rollout.temperature={rollout.temperature}: servers report log-probs before "
            "temperature and filters or after both; set it to 1, unset top_k, top_p, min_p, "
            "min_new_tokens and logit_bias, or use the built-in engine"
        )


def _require_address(option: str, url: str, key_variable: str, has_path: bool = False) -> None:
    """Raise `UserError` for what is no address of a server, or one with a secret in it.

    An address with a path may have a query, which no message repeats.
    """
    form = "HOST/PATH" if has_path else "HOST:PORT"
    secrets = "a user name or a password" if has_path else "a user name, a password or a query"
    problem = f"expected http://{form} or https://{form}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address &= parts.port is None or parts.port > 0
    except ValueError:
        raise UserError(f"{option}: {problem}") from None
    if parts.username or parts.password or (parts.query and not has_path):
        raise UserError(
            f"{option}: the address contains {secrets}; set the environment variable "
            f"{key_variable} instead"
        )
    if not is_address:
        shown = "" if "@" in url else f"={url!r}"
        raise UserError(f"{option}{shown}: {problem}")


def _validate_environment(options: MultiTurn, cache_dir: str) -> None:
    """Validate the name of an environment, and the options that belong to its kind."""
    environment = options.environment
    if environment and ":" not in environment:
        raise UserError(
            f"config.rollout.multi_turn.environment={environment!r}: expected module:Class, "
            "path/to/file.py:Class or http://HOST:PORT"
        )
    limit = ""
    if environment.startswith("tools:"):
        if cache_dir:
            raise UserError(
                f"config.data.cache_dir={cache_dir!r}: the prompts in it do not describe the tools "
                f"of config.rollout.multi_turn.environment={environment!r}; leave it empty"
            )
        limit = "python_timeout"
    elif environment.startswith(("http://", "https://")):
        option = "config.rollout.multi_turn.environment"
        _require_address(option, environment, "JAX_PPO_ENVIRONMENT_KEY")
        limit = "url_timeout"
    if limit and getattr(options, limit) >= options.timeout:
        raise UserError(
            f"config.rollout.multi_turn.{limit}={getattr(options, limit):g}: expected less than "
            f"config.rollout.multi_turn.timeout={options.timeout:g}, which bounds all calls of a "
            "turn together"
        )


def _validate_comparisons(algorithm: Algorithm, reward: Reward, rollout: RolloutOptions) -> None:
    """Validate that there is what an estimator, or the selection of prompts, compares."""
    estimator = algorithm.adv_estimator
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
    responses = rollout.keep or rollout.n
    setting = f"config.rollout.{'n' if rollout.keep is None else 'keep'}={responses}"
    # The advantage of a single response within its group is always 0.
    if entry.needs_groups and responses < 2:
        raise UserError(
            f"{setting}: config.algorithm.adv_estimator={estimator!r} compares responses to one "
            "prompt; set it to 2 or more"
        )
    if algorithm.filter_groups.enable and responses < 2:
        raise UserError(
            f"{setting}: config.algorithm.filter_groups.enable=True compares the rewards of a "
            "prompt's responses; set it to 2 or more"
        )
    setting = f"config.algorithm.adv_estimator={estimator!r}"
    try:
        names = parsing.parse_weights(reward.components)
    except ValueError as error:
        raise UserError(f"config.reward.components={reward.components!r}: {error}") from None
    if entry.needs_components and not names:
        raise UserError(
            f"{setting}: normalizes each reward of a response; name those that the reward function "
            "returns: config.reward.components=NAME:WEIGHT,NAME:WEIGHT"
        )
    selects_samples = algorithm.filter_groups.enable or rollout.keep is not None
    if (entry.needs_components or entry.needs_greedy) and selects_samples:
        raise UserError(
            f"{setting}: cannot compare responses that were selected by their rewards; leave "
            "config.algorithm.filter_groups.enable and config.rollout.keep unset"
        )
    if entry.needs_greedy and rollout.max_staleness:
        raise UserError(
            f"{setting}: a checkpoint does not hold greedy responses that were sampled a step "
            "ahead; set config.rollout.max_staleness=0"
        )
    for name, value in (
        ("reward.model_path", reward.model_path),
        ("rollout.multi_turn.environment", rollout.multi_turn.environment),
    ):
        if entry.needs_greedy and value:
            raise UserError(
                f"{setting}: only rules score its greedy responses; leave "
                f"config.{name}={value!r} empty"
            )


def _require_responses_that_continue(value_of: Callable[[str], object]) -> None:
    """Validate the options, by name, of responses that continue from step to step."""
    setting = f"config.rollout.max_staleness={value_of('rollout.max_staleness')}"
    remedy = "config.rollout.max_staleness to 0 or 1"
    length = value_of("rollout.stage_length")
    longest = value_of("data.max_response_length")
    assert isinstance(longest, int)
    if value_of("rollout.verify_drafts"):
        setting, remedy = "config.rollout.verify_drafts=True", "config.rollout.verify_drafts=False"
        if longest == 1:
            raise UserError(
                f"{setting}: expected config.data.max_response_length of at least 2, got 1: a "
                "draft of one token is as much work to verify as to sample"
            )
    elif not isinstance(length, int) or length >= longest:
        raise UserError(
            f"config.rollout.stage_length={length}: expected the tokens that are drawn at a time "
            f"with {setting}, fewer than config.data.max_response_length={longest}, such as "
            f"{max(1, longest // 8)}"
        )
    expected = {
        "rollout.engine": "built-in",
        "rollout.mesh.model": None,
        "rollout.exact_filters": False,
        "rollout.multi_turn.environment": "",
        "actor.router_replay.mode": "disabled",
        "mesh.virtual_replicas": 0,
    }
    _require_values(
        value_of,
        expected,
        f"{setting}, whose responses continue from step to step; or set {remedy}",
    )


def _validate_rewards(
    reward: Reward, teacher: Teacher, control: KLControl, longest: int, samples: int
) -> None:
    """Validate what responses of at most `longest` tokens earn, in steps of so many samples."""
    if reward.url:
        _require_address("config.reward.url", reward.url, "JAX_PPO_REWARD_KEY", has_path=True)
    if reward.overlong_buffer_len > longest:  # verl#2107
        raise UserError(
            f"config.reward.overlong_buffer_len={reward.overlong_buffer_len}: expected at most "
            f"config.data.max_response_length={longest}"
        )
    if teacher.path and not (teacher.reward_coef or teacher.loss_coef):
        raise UserError(
            "config.teacher.reward_coef=0.0: expected more than 0, or a config.teacher.loss_coef "
            "above 0; otherwise nothing reads config.teacher.path"
        )
    # The coefficient stays positive while 0.2 x samples < horizon (kernels/kl.py).
    if control.type == "adaptive" and control.horizon < samples:
        raise UserError(
            f"config.algorithm.kl_ctrl.horizon={control.horizon}: must be at least the {samples} "
            "samples of a step, or one step could take the coefficient far past its target"
        )


def _validate_losses(actor: Actor, reuse_logprobs: str, rollout_is: str) -> None:
    """Validate the constants of the actor's loss, and what its ratios compare."""
    constant = actor.clip_ratio_c
    if constant and constant <= 1:
        raise UserError(
            f"config.actor.clip_ratio_c={constant}: the dual clip's constant must be above 1; 0 "
            "turns it off"
        )
    if reuse_logprobs == "always" and rollout_is != "none":
        raise UserError(
            "config.rollout.reuse_logprobs='always': leaves "
            f"config.algorithm.rollout_is={rollout_is!r} no other log-probs to compare the "
            "sampler's with; set it to 'auto'"
        )


def _validate_model(model: Model, train_files: str) -> None:
    """Validate the adapters, and the sizes of a model that is created."""
    lora, create = model.lora, model.create
    try:
        parsing.parse_lora_targets(lora.targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={lora.targets!r}: {error}") from None
    if lora.path and lora != dataclasses.replace(Lora(), path=lora.path):
        raise UserError(
            f"config.model.lora.path={lora.path!r}: determines rank, alpha and targets; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )
    # The created model is taught only arithmetic.
    if not model.path and not train_files.startswith("arithmetic:"):
        raise UserError(
            "config.model.path='': must be set to a Hugging Face folder or hub name; a model is "
            "created only for the `arithmetic` data"
        )
    if create.hidden_size % create.num_heads or create.num_heads % create.num_kv_heads:
        raise UserError(
            f"config.model.create: num_heads={create.num_heads} must divide "
            f"hidden_size={create.hidden_size}, and num_kv_heads={create.num_kv_heads} must divide "
            "num_heads"
        )


def _validate_mesh(mesh: MeshShape, decoding_mesh: RolloutMesh, packing: Packing) -> None:
    """Validate the axes of the meshes, and that `mesh.context` splits a packed row evenly."""
    row_length = packing.row_length
    parts = mesh.context
    # Each part has two blocks of columns.
    if row_length is not None and parts > 1 and row_length % (2 * parts):
        raise UserError(
            f"config.packing.row_length={row_length}: expected a multiple of {2 * parts}, twice "
            f"config.mesh.context={parts}, or leave it unset"
        )
    free = [axis for axis in ("model", "fsdp", "data") if getattr(mesh, axis) == -1]
    if len(free) > 1:
        raise UserError(
            f"config.mesh.{free[0]}=-1: only one axis can be -1; set config.mesh.{free[1]}, for "
            "example to 1"
        )
    sizes = {f"mesh.{axis}": getattr(mesh, axis) for axis in ("data", "fsdp", "model")}
    for name, size in (sizes | {"rollout.mesh.data": decoding_mesh.data}).items():
        if size == 0:
            raise UserError(f"config.{name}=0: expected -1 or at least 1")


def _reject_router_loss_of_parts(parts: int, **coefs: float) -> None:
    """Raise `UserError` for a router loss, a mean over sequences, if devices split sequences."""
    for name, coef in coefs.items():
        if coef and parts > 1:
            raise UserError(
                f"config.{name}.router_aux_loss_coef={coef}: is computed from whole sequences, "
                f"which config.mesh.context={parts} splits; set one of them to its default"
            )


def _validate_processes_and_loggers(options: Distributed, trainer: Trainer) -> None:
    if options.coordinator_address and not 0 <= options.process_id < options.num_processes:
        raise UserError(
            f"config.distributed.process_id={options.process_id}: expected 0 to num_processes - "
            f"1 = {options.num_processes - 1} with config.distributed.coordinator_address set"
        )
    for logger in parsing.parse_names(trainer.logger):
        if logger not in LOGGERS:
            raise UserError(
                f"config.trainer.logger={trainer.logger!r}: expected some of {', '.join(LOGGERS)}, "
                f"separated by commas.{did_you_mean(logger, LOGGERS)}"
            )
