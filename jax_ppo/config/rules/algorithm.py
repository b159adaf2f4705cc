"""Rules of sampling, rewards and the algorithm."""

from jax_ppo.config import parsing
from jax_ppo.config.schema import Actor, Config, KLControl, Reward, RolloutOptions, Teacher
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.registries import ADVANTAGE_ESTIMATORS


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


def require_known_rollout_engine(engine: str) -> None:
    """Raise `UserError` unless `rollout.engine` is built in or named `module:Class`."""
    if engine != "built-in" and ":" not in engine:
        raise UserError(
            f"config.rollout.engine={engine!r}: expected 'built-in' or module:Class."
            f"{did_you_mean(engine, ['built-in'])}"
        )


def require_known_environment(environment: str) -> None:
    """Raise `UserError` unless `rollout.multi_turn.environment` is empty or `module:Class`."""
    if environment and ":" not in environment:
        raise UserError(
            f"config.rollout.multi_turn.environment={environment!r}: expected module:Class or "
            "path/to/file.py:Class"
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


def require_several_responses_to_compare(config: Config) -> None:
    """Raise `UserError` for an estimator that compares responses if there is one per prompt."""
    estimator = config.algorithm.adv_estimator
    # The advantage of a single response within its group is always 0.
    compares = ADVANTAGE_ESTIMATORS.lookup(estimator).needs_groups
    if compares and config.responses_per_prompt < 2:
        raise UserError(
            f"{_describe_responses(config)}: config.algorithm.adv_estimator={estimator!r} "
            "compares responses to one prompt; set it to 2 or more"
        )


def require_several_responses_to_filter(config: Config) -> None:
    """Raise `UserError` if groups of a single response are filtered, which never differ."""
    if config.algorithm.filter_groups.enable and config.responses_per_prompt < 2:
        raise UserError(
            f"{_describe_responses(config)}: config.algorithm.filter_groups.enable=True compares "
            "the rewards of a prompt's responses; set it to 2 or more"
        )


def _describe_responses(config: Config) -> str:
    """Return the option that sets the number of responses per prompt that are trained on."""
    if config.rollout.keep is None:
        return f"config.rollout.n={config.rollout.n}"
    return f"config.rollout.keep={config.rollout.keep}"


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
