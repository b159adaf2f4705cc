"""Rules that compare options with each other. Each raises `UserError` if it is violated.

In this order: data, batches and packed rows; models and adapters; sampling, rewards and the
algorithm; the mesh, processes and loggers, whose rules hold for every command.
"""

import dataclasses
import shlex
import urllib.parse
from collections.abc import Callable

from jax_ppo.config import parsing
from jax_ppo.config.schema import (
    LOGGERS,
    Actor,
    Algorithm,
    Create,
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
    Supervised,
    Teacher,
    Trainer,
    all_options,
)
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, ROLLOUT_ENGINES

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


def require_set(name: str, value: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not value:
        doc = next(option.facts.doc for option in all_options() if option.name == name)
        # The meaning of an empty value to other commands does not help here.
        meaning = doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def require_mini_batches_divide_batch(data: Data, actor: Actor, critic: Critic) -> None:
    """Raise `UserError` unless mini-batches divide the batch."""
    batch = data.train_batch_size
    sizes = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size}
    for name, mini_batch in sizes.items():
        if mini_batch and batch % mini_batch:
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is "
                f"{_nearest_divisor(batch, mini_batch)}"
            )


def require_row_holds_sample(packing: Packing, sequence_length: int) -> None:
    """Raise `UserError` unless a packed row holds the longest sample."""
    row_length = packing.row_length
    if row_length is not None and row_length < sequence_length:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold "
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{sequence_length} tokens; set it to that or more"
        )


def require_row_holds_example(packing: Packing, sequence_length: int, command: str) -> None:
    """Raise `UserError` unless a packed row holds the longest example of supervised training."""
    row_length = packing.row_length
    responses = RESPONSES_PER_EXAMPLE[command]
    longest = sequence_length * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )


def _nearest_divisor(number: int, target: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda divisor: abs(divisor - target))


def require_model_or_arithmetic(model: Model, data: Data) -> None:
    """Raise `UserError` without a model, except for the data that a model is created for."""
    # The created model is taught only arithmetic.
    if not model.path and not data.train_files.startswith("arithmetic:"):
        raise UserError(
            "config.model.path='': must be set to a Hugging Face folder or hub name; a model is "
            "created only for the `arithmetic` data"
        )


def require_heads_divide_width(create: Create) -> None:
    """Raise `UserError` unless the small model's heads divide its width."""
    if create.hidden_size % create.num_heads or create.num_heads % create.num_kv_heads:
        raise UserError(
            f"config.model.create: num_heads={create.num_heads} must divide "
            f"hidden_size={create.hidden_size}, and num_kv_heads={create.num_kv_heads} must divide "
            "num_heads"
        )


def require_known_lora_targets(lora: Lora) -> None:
    """Raise `UserError` for an adapter target that is not a projection."""
    try:
        parsing.parse_lora_targets(lora.targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={lora.targets!r}: {error}") from None


def require_lora_path_alone(lora: Lora) -> None:
    """Raise `UserError` for a rank, alpha or targets besides adapters that determine them."""
    if lora.path and lora != dataclasses.replace(Lora(), path=lora.path):
        raise UserError(
            f"config.model.lora.path={lora.path!r}: determines rank, alpha and targets; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )


def reject_adapters(lora: Lora, command: str) -> None:
    """Raise `UserError` for adapters in supervised training."""
    for name in ("rank", "path"):
        if value := getattr(lora, name):
            raise UserError(
                f"config.model.lora.{name}={value!r}: jax_ppo.{command} trains all parameters, "
                "only jax_ppo.train trains adapters; leave it unset"
            )


def reject_center_coef_in_sft(supervised: Supervised, command: str) -> None:
    """Raise `UserError` for the reward model's loss term in fine-tuning."""
    center_coef = supervised.center_coef
    if command == "sft" and center_coef:
        raise UserError(
            f"config.supervised.center_coef={center_coef}: only jax_ppo.reward_model reads it"
        )


def require_valid_top_k(rollout: RolloutOptions) -> None:
    """Raise `UserError` for a top_k of 0, which the range of the option includes."""
    samplings = {"rollout": rollout, "rollout.val_kwargs": rollout.val_kwargs}
    for name, sampling in samplings.items():
        if sampling.top_k == 0:
            raise UserError(f"config.{name}.top_k=0: expected -1 (all tokens) or at least 1")


def reject_reuse_with_importance_weights(rollout: RolloutOptions, rollout_is: str) -> None:
    """Raise `UserError` for importance weights that would all be 1."""
    if rollout.reuse_logprobs == "always" and rollout_is != "none":
        raise UserError(
            "config.rollout.reuse_logprobs='always': leaves "
            f"config.algorithm.rollout_is={rollout_is!r} no other log-probs to compare the "
            "sampler's with; set it to 'auto'"
        )


def require_dual_clip_above_one(actor: Actor) -> None:
    """Raise `UserError` for a dual clip's constant of at most 1."""
    constant = actor.clip_ratio_c
    if constant and constant <= 1:
        raise UserError(
            f"config.actor.clip_ratio_c={constant}: the dual clip's constant must be above 1; 0 "
            "turns it off"
        )


def require_engine_fits(rollout: RolloutOptions) -> None:
    """Raise `UserError` for options that the external engine cannot follow."""
    entry = ROLLOUT_ENGINES.lookup(rollout.engine)
    if not entry.is_external:
        return
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
    if entry.is_server:
        _require_usable_server(rollout)


def _require_usable_server(rollout: RolloutOptions) -> None:
    """Raise `UserError` without a valid address, or if log-probs would be of other draws."""
    if not rollout.url and not (rollout.engine == "vllm" and rollout.vllm.python):
        requirement = ROLLOUT_ENGINES[rollout.engine].requirement.replace("`", "")
        raise UserError(f"config.rollout.engine={rollout.engine!r}: needs {requirement}")
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


def _require_address(option: str, url: str, key_variable: str) -> None:
    """Raise `UserError` for what is no address of a server, or one with a secret in it."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address &= parts.port is None or parts.port > 0
    except ValueError:
        raise UserError(f"{option}: expected http://HOST:PORT or https://HOST:PORT") from None
    if parts.username or parts.password or parts.query:
        raise UserError(
            f"{option}: the address contains a user name, a password or a query; set the "
            f"environment variable {key_variable} instead"
        )
    if not is_address:
        raise UserError(f"{option}={url!r}: expected http://HOST:PORT or https://HOST:PORT")


def require_known_environment(options: MultiTurn, cache_dir: str) -> None:
    """Raise `UserError` for what names no environment, or for options that do not fit it.

    Args:
      options: `config.rollout.multi_turn`.
      cache_dir: `config.data.cache_dir`.
    """
    environment = options.environment
    if environment and ":" not in environment:
        raise UserError(
            f"config.rollout.multi_turn.environment={environment!r}: expected module:Class, "
            "path/to/file.py:Class or http://HOST:PORT"
        )
    if environment.startswith("tools:"):
        if cache_dir:
            raise UserError(
                f"config.data.cache_dir={cache_dir!r}: the prompts in it do not describe the tools "
                f"of config.rollout.multi_turn.environment={environment!r}; leave it empty"
            )
        if options.python_timeout >= options.timeout:
            raise UserError(
                f"config.rollout.multi_turn.python_timeout={options.python_timeout:g}: expected "
                f"less than config.rollout.multi_turn.timeout={options.timeout:g}, which bounds "
                "all calls of a turn together"
            )
    if not environment.startswith(("http://", "https://")):
        return
    option = "config.rollout.multi_turn.environment"
    _require_address(option, environment, "JAX_PPO_ENVIRONMENT_KEY")
    if options.url_timeout >= options.timeout:
        raise UserError(
            f"config.rollout.multi_turn.url_timeout={options.url_timeout:g}: expected less than "
            f"config.rollout.multi_turn.timeout={options.timeout:g}, which bounds all calls of a "
            "turn together"
        )


def require_valid_constraints(rollout: RolloutOptions, longest: int) -> None:
    """Raise `UserError` for a malformed constraint on sampling, or a minimum that is too long."""
    for name, parse in (
        ("stop", parsing.parse_strings),
        ("bad_words", parsing.parse_strings),
        ("logit_bias", parsing.parse_logit_bias),
    ):
        try:
            parse(getattr(rollout, name))
        except ValueError as error:
            raise UserError(f"config.rollout.{name}: {error}") from error
    if rollout.min_new_tokens > longest:
        raise UserError(
            f"config.rollout.min_new_tokens={rollout.min_new_tokens}: must be at most "
            f"config.data.max_response_length={longest}"
        )


def require_several_responses_to_compare(algorithm: Algorithm, rollout: RolloutOptions) -> None:
    """Raise `UserError` if there is one response per prompt, and something compares several."""
    responses = rollout.keep or rollout.n
    if responses >= 2:
        return
    name = "n" if rollout.keep is None else "keep"
    setting = f"config.rollout.{name}={responses}"
    estimator = algorithm.adv_estimator
    # The advantage of a single response within its group is always 0.
    if ADVANTAGE_ESTIMATORS.lookup(estimator).needs_groups:
        raise UserError(
            f"{setting}: config.algorithm.adv_estimator={estimator!r} compares responses to one "
            "prompt; set it to 2 or more"
        )
    if algorithm.filter_groups.enable:
        raise UserError(
            f"{setting}: config.algorithm.filter_groups.enable=True compares the rewards of a "
            "prompt's responses; set it to 2 or more"
        )


def require_what_the_estimator_compares(
    algorithm: Algorithm, reward: Reward, rollout: RolloutOptions
) -> None:
    """Raise `UserError` if an estimator lacks rewards one by one, or scores of greedy responses."""
    estimator = algorithm.adv_estimator
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
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
    if entry.needs_greedy:
        for name, value in (
            ("reward.model_path", reward.model_path),
            ("rollout.multi_turn.environment", rollout.multi_turn.environment),
        ):
            if value:
                raise UserError(
                    f"{setting}: only rules score its greedy responses; leave "
                    f"config.{name}={value!r} empty"
                )


def require_responses_that_continue(value_of: Callable[[str], object]) -> None:
    """Raise `UserError` for what responses that continue from step to step cannot have.

    Args:
      value_of: returns the value of an option by its name.
    """
    setting = f"config.rollout.max_staleness={value_of('rollout.max_staleness')}"
    length = value_of("rollout.stage_length")
    longest = value_of("data.max_response_length")
    assert isinstance(longest, int)
    if not isinstance(length, int) or length >= longest:
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
    for name, value in expected.items():
        if (given := value_of(name)) != value:
            raise UserError(
                f"config.{name}={given!r}: expected {value!r} with {setting}, whose responses "
                "continue from step to step; or set config.rollout.max_staleness to 0 or 1"
            )


def require_responses_to_rank(
    options: Evaluate, sampling: Sampling, estimator: str, reward: Reward
) -> None:
    """Raise `UserError` if an evaluation has nothing to rank, or nothing to rank it by."""
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
    if rank_by == "critic" and not ADVANTAGE_ESTIMATORS.lookup(estimator).needs_critic:
        raise UserError(
            f"{setting}: there is no critic with config.algorithm.adv_estimator="
            f"{estimator!r}; expected 'gae'"
        )
    # The value of a whole response is that of its last token.
    if rank_by == "critic" and ADVANTAGE_ESTIMATORS.lookup(estimator).values_turns:
        raise UserError(
            f"{setting}: with config.algorithm.adv_estimator={estimator!r} the critic learns "
            "values only where turns start; expected 'gae' or 'bi_level_gae'"
        )
    if rank_by == "reward_model" and not reward.model_path:
        raise UserError(f"{setting}: there is no reward model; set config.reward.model_path")


def require_kept_responses_to_be_sampled(rollout: RolloutOptions) -> None:
    """Raise `UserError` if more responses are kept than sampled."""
    keep = rollout.keep
    if keep is not None and keep > rollout.n:
        raise UserError(
            f"config.rollout.keep={keep}: expected at most config.rollout.n={rollout.n}"
        )


def require_overlong_buffer_within_response(reward: Reward, longest: int) -> None:
    """Raise `UserError` for a buffer that is longer than a response (verl#2107)."""
    if reward.overlong_buffer_len > longest:
        raise UserError(
            f"config.reward.overlong_buffer_len={reward.overlong_buffer_len}: expected at most "
            f"config.data.max_response_length={longest}"
        )


def require_teacher_to_teach(teacher: Teacher) -> None:
    """Raise `UserError` for a teacher that neither rewards nor loss read."""
    if teacher.path and not (teacher.reward_coef or teacher.loss_coef):
        raise UserError(
            "config.teacher.reward_coef=0.0: expected more than 0, or a config.teacher.loss_coef "
            "above 0; otherwise nothing reads config.teacher.path"
        )


def require_horizon_holds_step(control: KLControl, samples: int) -> None:
    """Raise `UserError` for an adaptive KL controller that could overshoot in one step."""
    # The coefficient stays positive while 0.2 x samples < horizon (kernels/kl.py).
    if control.type == "adaptive" and control.horizon < samples:
        raise UserError(
            f"config.algorithm.kl_ctrl.horizon={control.horizon}: must be at least the {samples} "
            "samples of a step, or one step could take the coefficient far past its target"
        )


def reject_what_files_lack(reward: Reward, score: Score) -> None:
    """Raise `UserError` for rewards that a critic cannot have from files of responses."""
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


def require_the_teachers_loss_alone(value_of: Callable[[str], object]) -> None:
    """Raise `UserError` for what a step on the responses of other policies cannot have.

    A policy gradient would need the log-probs of the policy that wrote them. Both kinds of steps
    run the same compiled programs, so sampled responses have as many and the same arrays.

    Args:
      value_of: returns the value of an option by its name.
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
    for name, value in expected.items():
        if (given := value_of(name)) != value:
            raise UserError(
                f"config.{name}={given!r}: expected {value!r} with {fraction}, whose other steps "
                "have the prompts and responses of config.score.file, and the teacher's loss alone"
            )
    estimator = str(value_of("algorithm.adv_estimator"))
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
    if entry.needs_critic or entry.needs_greedy or entry.needs_components:
        raise UserError(
            f"config.algorithm.adv_estimator={estimator!r}: expected one that "
            f"needs only rewards with {fraction}, such as 'reinforce_plus_plus'"
        )


def reject_comparison_in_score(estimator: str) -> None:
    """Raise `UserError` for an estimator that compares what a file of responses does not have."""
    entry = ADVANTAGE_ESTIMATORS.lookup(estimator)
    if entry.needs_greedy or entry.needs_components:
        raise UserError(
            f"config.algorithm.adv_estimator={estimator!r}: compares greedy responses or several "
            "rewards, which jax_ppo.score does not have; choose another estimator"
        )


def require_row_divides(packing: Packing, mesh: MeshShape) -> None:
    """Raise `UserError` unless the devices of `mesh.context` can split a packed row evenly."""
    row_length = packing.row_length
    parts = mesh.context
    # Each part has two blocks of columns.
    if row_length is not None and parts > 1 and row_length % (2 * parts):
        raise UserError(
            f"config.packing.row_length={row_length}: expected a multiple of {2 * parts}, twice "
            f"config.mesh.context={parts}, or leave it unset"
        )


def reject_what_splits_shared_prompts(
    packing: Packing, mesh: MeshShape, actor: Actor, critic: Critic
) -> None:
    """Raise `UserError` for options under which samples cannot share a prompt in a packed row."""
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


def reject_router_loss_of_parts(mesh: MeshShape, **coefs: float) -> None:
    """Raise `UserError` for a router loss, a mean over sequences, if devices split sequences."""
    for name, coef in coefs.items():
        if coef and mesh.context > 1:
            raise UserError(
                f"config.{name}.router_aux_loss_coef={coef}: is computed from whole sequences, "
                f"which config.mesh.context={mesh.context} splits; set one of them to its "
                "default"
            )


def require_one_remaining_axis(mesh: MeshShape) -> None:
    """Raise `UserError` if several mesh axes would use the remaining devices."""
    free = [axis for axis in ("model", "fsdp", "data") if getattr(mesh, axis) == -1]
    if len(free) > 1:
        raise UserError(
            f"config.mesh.{free[0]}=-1: only one axis can be -1; set config.mesh.{free[1]}, for "
            "example to 1"
        )


def reject_virtual_replicas(mesh: MeshShape, command: str) -> None:
    """Raise `UserError` for virtual replicas in supervised training, which has none."""
    if mesh.virtual_replicas:
        raise UserError(
            f"config.mesh.virtual_replicas={mesh.virtual_replicas}: jax_ppo.{command} does not "
            "divide its batches among them; leave it at 0"
        )


def require_positive_axes(mesh: MeshShape, decoding_mesh: RolloutMesh) -> None:
    """Raise `UserError` for a mesh axis of 0 devices, which the range of the option includes."""
    for axis in ("data", "fsdp", "model"):
        if getattr(mesh, axis) == 0:
            raise UserError(f"config.mesh.{axis}=0: expected -1 or at least 1")
    if decoding_mesh.data == 0:
        raise UserError("config.rollout.mesh.data=0: expected -1 or at least 1")


def require_process_id(options: Distributed) -> None:
    """Raise `UserError` for a process whose index is not below the number of processes."""
    if options.coordinator_address and not 0 <= options.process_id < options.num_processes:
        raise UserError(
            f"config.distributed.process_id={options.process_id}: expected 0 to num_processes - "
            f"1 = {options.num_processes - 1} with config.distributed.coordinator_address set"
        )


def require_known_loggers(trainer: Trainer) -> None:
    """Raise `UserError` for a logger that does not exist."""
    text = trainer.logger
    for logger in parsing.parse_names(text):
        if logger not in LOGGERS:
            raise UserError(
                f"config.trainer.logger={text!r}: expected some of {', '.join(LOGGERS)}, separated "
                f"by commas.{did_you_mean(logger, LOGGERS)}"
            )
