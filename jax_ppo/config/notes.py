"""Notes about options that are permitted but may not be what the user meant."""

from collections.abc import Iterator

from jax_ppo.config.schema import (
    Actor,
    Algorithm,
    Config,
    RolloutOptions,
    all_options,
    option_value,
)
from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    ROLLOUT_ENGINES,
)


def train_notes(config: Config) -> list[str]:
    """Return notes for a `train` run: easily missed biases, and options without an effect."""
    actor, algorithm = config.actor, config.algorithm
    advice = (
        note_truncated_distribution(config.rollout),
        note_biased_kl_in_reward(algorithm),
        note_idle_kl_loss(actor),
        note_unusual_clip(actor),
        note_biased_policy_loss(actor.policy_loss, config.updates_once),
        note_reference_without_adapters(
            config.model.lora.path,
            restrains=algorithm.use_kl_in_reward or actor.use_kl_loss,
            has_path=bool(config.reference.path),
        ),
        note_merged_adapters(config.rollout.engine, config.has_adapters),
        note_rows_taken_as_they_are(config.samples_nothing),
        note_turns_without_environment(
            algorithm.adv_estimator,
            bool(config.rollout.multi_turn.environment) or config.learns_from_files,
        ),
    )
    ineffective = []
    for option in all_options():
        value = option_value(config, option.name)
        conditions = option.facts.effective_when
        unmet = [condition.summary for condition in conditions if not condition.is_met(config)]
        if value != option.default and unmet:
            ineffective.append(
                f"config.{option.name}={value!r} has no effect with the other options: it is "
                f"read only if {' and '.join(unmet)}"
            )
    # A critic's run takes the configuration of the run that it is for.
    commands = ("train", "critic") if config.trainer.critic_only else ("train",)
    return [*filter(None, advice), *ineffective, *note_unread_options(config, *commands)]


def note_unread_options(config: Config, *commands: str) -> Iterator[str]:
    """Yield a note for each changed option that belongs to none of these commands."""
    for option in all_options():
        value = option_value(config, option.name)
        # An option at its default was not set by the user.
        if value != option.default and not {*commands} & {*option.read_by}:
            # The others take a configuration of train.
            commands_of_option = ("train",) if "train" in option.read_by else option.read_by
            readers = " and ".join(f"jax_ppo.{reader}" for reader in commands_of_option)
            yield f"config.{option.name}={value!r} is not read: it belongs to {readers}"


def note_long_warmup(warmup: int, total_steps: int) -> str | None:
    """Return a note if the run is over before the actor is trained."""
    if warmup >= total_steps:
        return (
            f"config.trainer.critic_warmup={warmup}: the actor is never trained in "
            f"{total_steps} steps"
        )
    return None


def note_truncated_distribution(rollout: RolloutOptions) -> str | None:
    """Return a note if sampling filters make training off-policy (trl#6789, verl#6240)."""
    if rollout.truncates and not rollout.exact_filters:
        return (
            "config.rollout.top_k, top_p and min_p truncate the distribution that is sampled from, "
            "while log-probs and ratios are of the full one: training is off-policy to that "
            "extent, unless config.rollout.exact_filters is on"
        )
    return None


def note_biased_kl_in_reward(algorithm: Algorithm) -> str | None:
    """Return a note if the KL in the reward does not follow the gradient of the KL."""
    is_unbiased = KL_ESTIMATORS.lookup(algorithm.kl_penalty).unbiased_in_reward
    if algorithm.use_kl_in_reward and not is_unbiased:
        unbiased = " and ".join(KL_ESTIMATORS.names(lambda entry: entry.unbiased_in_reward))
        return (
            f"config.algorithm.kl_penalty={algorithm.kl_penalty!r}: in the reward only {unbiased} "
            "follows the gradient of the KL; kernels/kl.py describes the others"
        )
    return None


def note_idle_kl_loss(actor: Actor) -> str | None:
    """Return a note if the KL in the loss has no expected gradient."""
    kind = actor.kl_loss_type
    if actor.use_kl_loss and not KL_ESTIMATORS.lookup(kind).restrains_in_loss:
        return (
            f"config.actor.kl_loss_type={kind!r}: its expected gradient is 0, so it does not "
            "restrain the policy; k2 does"
        )
    return None


def note_unusual_clip(actor: Actor) -> str | None:
    """Return a note if what is no ratio of a token is clipped as if it were one."""
    # A range that the user set is intended, whatever its size.
    has_own_range = actor.clip_ratio_low is not None or actor.clip_ratio_high is not None
    authors_range = POLICY_LOSSES.lookup(actor.policy_loss).authors_clip
    if authors_range and not has_own_range:
        low, high = authors_range
        return (
            f"config.actor.policy_loss={actor.policy_loss!r}: config.actor.clip_ratio="
            f"{actor.clip_ratio} is meant for the ratio of a token; its authors use "
            f"clip_ratio_low={low} and clip_ratio_high={high}"
        )
    return None


def note_biased_policy_loss(loss: str, updates_once: bool) -> str | None:
    """Return a note if a loss without a ratio is used for several optimizer steps."""
    if POLICY_LOSSES.lookup(loss).needs_one_update and not updates_once:
        return (
            f"config.actor.policy_loss={loss!r}: is biased once the policy has changed; it is "
            "meant for one optimizer step per rollout"
        )
    return None


def note_reference_without_adapters(path: str, restrains: bool, has_path: bool) -> str | None:
    """Return a note if the KL is not measured to the policy that training starts from."""
    if path and restrains and not has_path:
        return (
            f"config.model.lora.path={path!r}: the reference is the bare base, not the policy "
            f"that training starts from; config.reference.path={path!r} measures the KL to that"
        )
    return None


def note_merged_adapters(engine: str, has_adapters: bool) -> str | None:
    """Return a note if the sampler's weights are rounded where the trainer's adapters are not."""
    if has_adapters and ROLLOUT_ENGINES.lookup(engine).is_external:
        return (
            f"config.rollout.engine={engine!r}: gets the adapters merged into the weights, which "
            "rounds small changes away in bfloat16; watch rollout/logprob_difference"
        )
    return None


def note_turns_without_environment(estimator: str, may_have_turns: bool) -> str | None:
    """Return a note if an estimator tells turns apart and every response is one turn."""
    if ADVANTAGE_ESTIMATORS.lookup(estimator).reads_turns and not may_have_turns:
        return (
            f"config.algorithm.adv_estimator={estimator!r}: every response is one turn without a "
            "config.rollout.multi_turn.environment, so algorithm.turn_gamma and turn_lam do "
            "nothing"
        )
    return None


def note_rows_taken_as_they_are(samples_nothing: bool) -> str | None:
    """Return a note on what given responses replace."""
    if samples_nothing:
        return (
            "config.score.file: each row is one response and is taken as it is; data.train_files, "
            "data.cache_dir, data.curriculum, rollout.n, rollout.keep, rollout.max_staleness and "
            "algorithm.filter_groups are not read"
        )
    return None
