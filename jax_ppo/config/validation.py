"""Validate options against each other: incompatible sizes, and options that require others.

Names, types and ranges of single options are validated in loading.py. Each rule in rules.py
takes the sections that it compares.
"""

import functools

from jax_ppo.config import rules
from jax_ppo.config.schema import Config, all_options, option_value
from jax_ppo.errors import UserError


def validate_config(config: Config, command: str) -> None:
    """Validate the options of a command; raise `UserError` on the first problem."""
    if command in ("sft", "reward_model"):
        _validate_supervised_config(config, command)
    else:
        _validate_ppo_config(config, command)
        command = "train"
    # The machine: the mesh, the processes and the loggers.
    rules.require_row_divides(config.packing, config.mesh)
    rules.reject_router_loss_of_parts(
        config.mesh,
        actor=config.actor.router_aux_loss_coef,
        critic=config.critic.router_aux_loss_coef,
        supervised=config.supervised.router_aux_loss_coef,
    )
    rules.require_one_remaining_axis(config.mesh)
    rules.require_positive_axes(config.mesh, config.rollout.mesh)
    rules.require_process_id(config.distributed)
    rules.require_known_loggers(config.trainer)
    # Requirements come after the rules, whose messages are more specific.
    validate_requirements(config, command)


def _validate_ppo_config(config: Config, command: str) -> None:
    if command == "evaluate":
        rules.require_responses_to_rank(
            config.evaluate,
            config.rollout.val_kwargs,
            config.algorithm.adv_estimator,
            config.reward,
        )
    elif command == "score":
        rules.require_set("score.file", config.score.file)
        rules.require_set("model.path", config.model.path)
        rules.reject_comparison_in_score(config.algorithm.adv_estimator)
    elif command in ("train", "critic") and not config.learns_from_files:
        # A share of given responses excludes training files; its requirement asks for the rows.
        if command == "critic" or config.teacher.on_policy_fraction == 1:
            rules.require_set("data.train_files", config.data.train_files)
    data, rollout, lora = config.data, config.rollout, config.model.lora
    samples = data.train_batch_size * config.responses_per_prompt
    if config.learns_from_files:
        rules.require_set("model.path", config.model.path)
        rules.reject_what_files_lack(config.reward, config.score)
        if not config.samples_nothing:
            rules.require_the_teachers_loss_alone(functools.partial(option_value, config))
    rules.require_mini_batches_divide_batch(data, config.actor, config.critic)
    rules.require_row_holds_sample(config.packing, config.sequence_length)
    rules.reject_what_splits_shared_prompts(
        config.packing, config.mesh, config.actor, config.critic
    )
    rules.require_valid_top_k(rollout)
    rules.require_dual_clip_above_one(config.actor)
    rules.require_engine_fits(rollout)
    rules.require_known_environment(rollout.multi_turn, data.cache_dir)
    rules.require_valid_constraints(rollout, data.max_response_length)
    rules.require_several_responses_to_compare(config.algorithm, rollout)
    rules.require_what_the_estimator_compares(config.algorithm, config.reward, rollout)
    rules.require_kept_responses_to_be_sampled(rollout)
    if rollout.max_staleness > 1:
        rules.require_responses_that_continue(functools.partial(option_value, config))
    rules.require_overlong_buffer_within_response(config.reward, data.max_response_length)
    rules.require_known_lora_targets(lora)
    rules.require_lora_path_alone(lora)
    rules.reject_reuse_with_importance_weights(rollout, config.algorithm.rollout_is)
    rules.require_teacher_to_teach(config.teacher)
    rules.require_horizon_holds_step(config.algorithm.kl_ctrl, samples)
    rules.require_model_or_arithmetic(config.model, data)
    rules.require_heads_divide_width(config.model.create)


def _validate_supervised_config(config: Config, command: str) -> None:
    rules.require_set("data.train_files", config.data.train_files)
    # Only PPO creates a small model to start from, for its arithmetic data.
    rules.require_set("model.path", config.model.path)
    rules.require_row_holds_example(config.packing, config.sequence_length, command)
    rules.reject_center_coef_in_sft(config.supervised, command)
    rules.reject_adapters(config.model.lora, command)
    rules.reject_virtual_replicas(config.mesh, command)


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
