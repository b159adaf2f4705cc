"""Validate options against each other: incompatible sizes, and options that require others.

Names, types and ranges of single options are validated in loading.py. The rules are in rules/: each
takes the options and raises `UserError` if they violate it.
"""

from collections.abc import Callable

from jax_ppo.config.rules import algorithm, machine, model, sizes
from jax_ppo.config.schema import Config, all_options, option_value
from jax_ppo.errors import UserError

Rule = Callable[[Config], None]  # raises UserError


def validate_train_config(config: Config, reads_data: bool = True) -> None:
    """Validate a `train` config; raise `UserError` on the first problem.

    Args:
      config: all options.
      reads_data: whether the command reads the training data, which must be named then.
    """
    if reads_data:
        sizes.require_set(config, "data.train_files")
    for rule in TRAIN_RULES:
        rule(config)
    # Requirements come after the rules, whose messages are more specific.
    validate_requirements(config, "train")


def validate_supervised_config(config: Config, command: str) -> None:
    """Validate an `sft` or `reward_model` config; raise `UserError` on the first problem."""
    sizes.require_set(config, "data.train_files")
    # Only PPO creates a small model to start from, for its arithmetic data.
    sizes.require_set(config, "model.path")
    sizes.require_row_holds_example(config, command)
    model.reject_center_coef_in_sft(config, command)
    model.reject_adapters(config, command)
    for rule in MACHINE_RULES:
        rule(config)
    validate_requirements(config, command)


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


MACHINE_RULES: tuple[Rule, ...] = (
    machine.require_row_divides,
    machine.reject_router_loss_of_parts,
    machine.require_one_remaining_axis,
    machine.require_positive_axes,
    machine.require_process_id,
    machine.require_known_loggers,
)
TRAIN_RULES: tuple[Rule, ...] = (
    sizes.require_mini_batches_divide_batch,
    sizes.require_row_holds_sample,
    algorithm.require_valid_top_k,
    algorithm.require_dual_clip_above_one,
    algorithm.require_known_rollout_engine,
    algorithm.require_known_environment,
    algorithm.require_valid_constraints,
    algorithm.require_several_responses_to_compare,
    algorithm.require_several_responses_to_filter,
    algorithm.require_kept_responses_to_be_sampled,
    algorithm.require_overlong_buffer_within_response,
    model.require_known_lora_targets,
    model.require_lora_path_alone,
    algorithm.reject_reuse_with_importance_weights,
    algorithm.require_horizon_holds_step,
    *MACHINE_RULES,
    model.require_model_or_arithmetic,
    model.require_heads_divide_width,
)
