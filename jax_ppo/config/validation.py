"""Validate options against each other: sizes that do not fit and options that need others.

Names, types and ranges of single options are validated in loading.py.
"""

import dataclasses
from collections.abc import Callable

from jax_ppo.config import parsing
from jax_ppo.config.schema import LOGGERS, POLICY_LOSSES, Config, Lora, all_options, option_value
from jax_ppo.errors import UserError, did_you_mean

Rule = Callable[[Config], None]  # raises UserError

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


def validate_train_config(config: Config) -> None:
    """Validate a `train` config; raise `UserError` on the first problem."""
    for rule in TRAIN_RULES:
        rule(config)
    # After the rules, whose messages are more specific.
    validate_requirements(config, "train")


def validate_supervised_config(config: Config, command: str) -> None:
    """Validate an `sft` or `reward_model` config; raise `UserError` on the first problem."""
    require_set(config, "data.train_files")
    # Only PPO makes a small model to start from, for its arithmetic data.
    require_set(config, "model.path")
    require_row_holds_example(config, command)
    reject_center_coef_in_sft(config, command)
    reject_adapters(config, command)
    for rule in MACHINE_RULES:
        rule(config)
    validate_requirements(config, command)


def validate_requirements(config: Config, command: str) -> None:
    """Raise `UserError` for an option that was changed although what it requires is missing."""
    for option in all_options():
        value = option_value(config, option.name)
        # Options at their default, or that this command does not read, need nothing.
        if value == option.default or command not in option.read_by:
            continue
        for requirement in option.facts.requires:
            if not requirement.is_met(config):
                reason = requirement.message.format(config=config)
                raise UserError(f"config.{option.name}={value!r}: {reason}")


# Data and sizes


def require_set(config: Config, name: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not option_value(config, name):
        doc = next(option.facts.doc for option in all_options() if option.name == name)
        # What an empty value means to other commands is no help here.
        meaning = doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def require_train_files(config: Config) -> None:
    """Raise `UserError` if there is no training data."""
    require_set(config, "data.train_files")


def require_mini_batches_divide_batch(config: Config) -> None:
    """Raise `UserError` unless mini-batches divide the batch."""
    batch = config.data.train_batch_size
    for role in (config.actor, config.critic):
        mini_batch = role.ppo_mini_batch_size
        if mini_batch and batch % mini_batch:
            name = "actor" if role is config.actor else "critic"
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest that does is "
                f"{_nearest_divisor(batch, mini_batch)}"
            )


def require_row_holds_sample(config: Config) -> None:
    """Raise `UserError` unless a packed row holds the longest sample."""
    row_length = config.packing.row_length
    if row_length is not None and row_length < config.sequence_length:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold "
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{config.sequence_length} tokens; set it to that or more"
        )


def require_row_divides(config: Config) -> None:
    """Raise `UserError` unless the devices of `mesh.context` can split a packed row evenly."""
    row_length, parts = config.packing.row_length, config.mesh.context
    # Each part has two blocks of columns.
    if row_length is not None and parts > 1 and row_length % (2 * parts):
        raise UserError(
            f"config.packing.row_length={row_length}: expected a multiple of {2 * parts}, twice "
            f"config.mesh.context={parts}, or leave it unset"
        )


def reject_router_loss_of_parts(config: Config) -> None:
    """Raise `UserError` for a router loss, a mean over sequences, where devices hold parts."""
    for name in ("actor", "critic", "supervised"):
        coef = option_value(config, f"{name}.router_aux_loss_coef")
        if coef and config.mesh.context > 1:
            raise UserError(
                f"config.{name}.router_aux_loss_coef={coef}: is computed from whole sequences, of "
                f"which config.mesh.context={config.mesh.context} devices hold parts; set one of "
                "them to its default"
            )


def require_row_holds_example(config: Config, command: str) -> None:
    """Raise `UserError` unless a packed row holds the longest example of supervised training."""
    row_length = config.packing.row_length
    responses = RESPONSES_PER_EXAMPLE[command]
    longest = config.sequence_length * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )


# The model


def require_model_or_arithmetic(config: Config) -> None:
    """Raise `UserError` without a model, except for the data that comes with one."""
    # The model that is made knows nothing but arithmetic.
    if not config.model.path and not config.data.train_files.startswith("arithmetic:"):
        raise UserError(
            "config.model.path='': must be set to a Hugging Face folder or hub name; only the "
            "`arithmetic` data makes a model of its own"
        )


def require_heads_divide_width(config: Config) -> None:
    """Raise `UserError` unless the small model's heads divide its width."""
    create = config.model.create
    if create.hidden_size % create.num_heads or create.num_heads % create.num_kv_heads:
        raise UserError(
            f"config.model.create: num_heads={create.num_heads} must divide "
            f"hidden_size={create.hidden_size}, and num_kv_heads={create.num_kv_heads} must divide "
            "num_heads"
        )


def require_known_lora_targets(config: Config) -> None:
    """Raise `UserError` for an adapter target that is not a projection."""
    targets = config.model.lora.targets
    try:
        parsing.parse_lora_targets(targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={targets!r}: {error}") from None


def require_lora_path_alone(config: Config) -> None:
    """Raise `UserError` for a rank, alpha or targets besides the adapters that determine them."""
    lora = config.model.lora
    if lora.path and lora != dataclasses.replace(Lora(), path=lora.path):
        raise UserError(
            f"config.model.lora.path={lora.path!r}: determines rank, alpha and targets; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )


def reject_adapters(config: Config, command: str) -> None:
    """Raise `UserError` for adapters in supervised training."""
    for name in ("rank", "path"):
        if value := getattr(config.model.lora, name):
            raise UserError(
                f"config.model.lora.{name}={value!r}: jax_ppo.{command} trains all parameters, "
                "only jax_ppo.train trains adapters; leave it unset"
            )


def reject_center_coef_in_sft(config: Config, command: str) -> None:
    """Raise `UserError` for the reward model's loss term in fine-tuning."""
    center_coef = config.supervised.center_coef
    if command == "sft" and center_coef:
        raise UserError(
            f"config.supervised.center_coef={center_coef}: only jax_ppo.reward_model reads it"
        )


# Sampling, rewards and the algorithm


def require_valid_top_k(config: Config) -> None:
    """Raise `UserError` for a top_k of 0, which lies inside the range of the option."""
    samplings = {"rollout": config.rollout, "rollout.val_kwargs": config.rollout.val_kwargs}
    for name, sampling in samplings.items():
        if sampling.top_k == 0:
            raise UserError(f"config.{name}.top_k=0: expected -1 (all tokens) or at least 1")


def reject_reuse_with_importance_weights(config: Config) -> None:
    """Raise `UserError` for importance weights that would all be 1."""
    rollout_is = config.algorithm.rollout_is
    if config.rollout.reuse_logprobs == "always" and rollout_is != "none":
        raise UserError(
            "config.rollout.reuse_logprobs='always': leaves "
            f"config.algorithm.rollout_is={rollout_is!r} nothing to weigh against the sampler's "
            "log-probs; set it to 'auto'"
        )


def require_dual_clip_above_one(config: Config) -> None:
    """Raise `UserError` for a dual clip's constant of at most 1."""
    constant = config.actor.clip_ratio_c
    if constant and constant <= 1:
        raise UserError(
            f"config.actor.clip_ratio_c={constant}: the dual clip's constant must be above 1; 0 "
            "turns it off"
        )


def require_known_policy_loss(config: Config) -> None:
    """Raise `UserError` for a policy loss that is neither built in nor a function's name."""
    loss = config.actor.policy_loss
    if loss not in POLICY_LOSSES and ":" not in loss:
        raise UserError(
            f"config.actor.policy_loss={loss!r}: expected one of "
            f"{', '.join(map(repr, POLICY_LOSSES))} or "
            f"module:function.{did_you_mean(loss, POLICY_LOSSES)}"
        )


def require_known_rollout_engine(config: Config) -> None:
    """Raise `UserError` unless `rollout.engine` is built in or named `module:Class`."""
    engine = config.rollout.engine
    if engine != "built-in" and ":" not in engine:
        raise UserError(
            f"config.rollout.engine={engine!r}: expected 'built-in' or module:Class."
            f"{did_you_mean(engine, ['built-in'])}"
        )


def require_known_environment(config: Config) -> None:
    """Raise `UserError` unless `rollout.multi_turn.environment` is empty or `module:Class`."""
    environment = config.rollout.multi_turn.environment
    if environment and ":" not in environment:
        raise UserError(
            f"config.rollout.multi_turn.environment={environment!r}: expected module:Class or "
            "path/to/file.py:Class"
        )


def require_valid_constraints(config: Config) -> None:
    """Raise `UserError` for a malformed constraint on sampling, or a minimum that is too long."""
    rollout = config.rollout
    for name, parse in (
        ("stop", parsing.parse_strings),
        ("bad_words", parsing.parse_strings),
        ("logit_bias", parsing.parse_logit_bias),
    ):
        try:
            parse(getattr(rollout, name))
        except ValueError as error:
            raise UserError(f"config.rollout.{name}: {error}") from error
    longest = config.data.max_response_length
    if rollout.min_new_tokens > longest:
        raise UserError(
            f"config.rollout.min_new_tokens={rollout.min_new_tokens}: must be at most "
            f"config.data.max_response_length={longest}"
        )


def require_several_responses_to_compare(config: Config) -> None:
    """Raise `UserError` for an estimator that compares a prompt's responses if there is one."""
    estimator = config.algorithm.adv_estimator
    # The advantage of a single response within its group is always 0.
    compares = estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline")
    if compares and config.responses_per_prompt < 2:
        raise UserError(
            f"{_describe_responses(config)}: config.algorithm.adv_estimator={estimator!r} "
            "compares responses to one prompt; set it to 2 or more"
        )


def require_several_responses_to_filter(config: Config) -> None:
    """Raise `UserError` if groups of one response are filtered: none of them differs."""
    if config.algorithm.filter_groups.enable and config.responses_per_prompt < 2:
        raise UserError(
            f"{_describe_responses(config)}: config.algorithm.filter_groups.enable=True compares "
            "the rewards of a prompt's responses; set it to 2 or more"
        )


def _describe_responses(config: Config) -> str:
    """Return the option that decides how many responses to a prompt are trained on."""
    if config.rollout.keep is None:
        return f"config.rollout.n={config.rollout.n}"
    return f"config.rollout.keep={config.rollout.keep}"


def require_kept_responses_to_be_sampled(config: Config) -> None:
    """Raise `UserError` if more responses are kept than sampled."""
    keep, n = config.rollout.keep, config.rollout.n
    if keep is not None and keep > n:
        raise UserError(f"config.rollout.keep={keep}: expected at most config.rollout.n={n}")


def require_overlong_buffer_within_response(config: Config) -> None:
    """Raise `UserError` for a buffer that is longer than a response (verl#2107)."""
    reward = config.reward
    if reward.overlong_buffer_len > config.data.max_response_length:
        raise UserError(
            f"config.reward.overlong_buffer_len={reward.overlong_buffer_len}: expected at most "
            f"config.data.max_response_length={config.data.max_response_length}"
        )


def require_valid_schedules(config: Config) -> None:
    """Raise `UserError` for schedules that are read but cannot be parsed."""
    if config.actor.entropy_schedule:
        _require_schedule("actor.entropy_schedule", config.actor.entropy_schedule)
    control = config.algorithm.kl_ctrl
    if control.type in ("linear", "step"):
        _require_schedule("algorithm.kl_ctrl.schedule", control.schedule)


def require_horizon_holds_step(config: Config) -> None:
    """Raise `UserError` for an adaptive KL controller that could overshoot in one step."""
    control = config.algorithm.kl_ctrl
    samples = config.data.train_batch_size * config.responses_per_prompt
    # The coefficient stays positive while error_clip x samples < horizon (kernels/kl.py).
    if control.type == "adaptive" and control.horizon < samples:
        raise UserError(
            f"config.algorithm.kl_ctrl.horizon={control.horizon}: must be at least the {samples} "
            "samples of a step, or one step could take the coefficient far past its target"
        )


# The machine, and where curves are written


def require_one_remaining_axis(config: Config) -> None:
    """Raise `UserError` if several mesh axes would use the remaining devices."""
    free = [axis for axis in ("model", "fsdp", "data") if getattr(config.mesh, axis) == -1]
    if len(free) > 1:
        raise UserError(
            f"config.mesh.{free[0]}=-1: only one axis can be -1; set config.mesh.{free[1]}, for "
            "example to 1"
        )


def require_positive_axes(config: Config) -> None:
    """Raise `UserError` for a mesh axis of 0 devices, which lies inside the range of the option."""
    for axis in ("data", "fsdp", "model"):
        if getattr(config.mesh, axis) == 0:
            raise UserError(f"config.mesh.{axis}=0: expected -1 or at least 1")
    if config.rollout.mesh.data == 0:
        raise UserError("config.rollout.mesh.data=0: expected -1 or at least 1")


def require_process_id(config: Config) -> None:
    """Raise `UserError` for a process whose index is not below the number of processes."""
    explicit = config.distributed
    if explicit.coordinator_address and not 0 <= explicit.process_id < explicit.num_processes:
        raise UserError(
            f"config.distributed.process_id={explicit.process_id}: expected 0 to num_processes - "
            f"1 = {explicit.num_processes - 1} with config.distributed.coordinator_address set"
        )


def require_known_loggers(config: Config) -> None:
    """Raise `UserError` for a logger that does not exist."""
    text = config.trainer.logger
    for logger in parsing.parse_loggers(text):
        if logger not in LOGGERS:
            raise UserError(
                f"config.trainer.logger={text!r}: expected some of {', '.join(LOGGERS)}, separated "
                f"by commas.{did_you_mean(logger, LOGGERS)}"
            )


MACHINE_RULES: tuple[Rule, ...] = (
    require_row_divides,
    reject_router_loss_of_parts,
    require_one_remaining_axis,
    require_positive_axes,
    require_process_id,
    require_known_loggers,
)
TRAIN_RULES: tuple[Rule, ...] = (
    require_mini_batches_divide_batch,
    require_train_files,
    require_row_holds_sample,
    require_valid_top_k,
    require_dual_clip_above_one,
    require_known_policy_loss,
    require_known_rollout_engine,
    require_known_environment,
    require_valid_constraints,
    require_several_responses_to_compare,
    require_several_responses_to_filter,
    require_kept_responses_to_be_sampled,
    require_overlong_buffer_within_response,
    require_known_lora_targets,
    require_lora_path_alone,
    reject_reuse_with_importance_weights,
    require_valid_schedules,
    require_horizon_holds_step,
    *MACHINE_RULES,
    require_model_or_arithmetic,
    require_heads_divide_width,
)


def _require_schedule(name: str, text: str) -> None:
    try:
        parsing.parse_schedule(text)
    except ValueError as error:
        raise UserError(f"config.{name}={text!r}: {error}") from None


def _nearest_divisor(number: int, target: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda divisor: abs(divisor - target))
