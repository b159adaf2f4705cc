"""Apply the rules of the options: errors, and notes on values that have no effect.

Names, types and ranges of single options are validated in loading.py. Functions that validate raise
`UserError` at the first problem.
"""

import re
import urllib.parse
from collections.abc import Iterator, Mapping

from jax_ppo.config.option import SUPERVISED, option_value
from jax_ppo.config.option_rules import ENVIRONMENT_IS_SERVER
from jax_ppo.config.schema import Actor, Algorithm, Config, all_options
from jax_ppo.config.training_options import Optim
from jax_ppo.errors import UserError, counted
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, ROLLOUT_ENGINES

# Parameters of a query that are secrets, such as api_key and access_token.
_SECRET = re.compile(r"(?i)(key|token|secret|password|sig|signature)=")


def validate_config(config: Config, command: str) -> None:
    """Raise `UserError` for the first option, in the schema's order, that breaks a rule."""
    # Other commands take a configuration of train.
    readers = {command} if command in SUPERVISED else {command, "train"}
    for option in all_options():
        value = option_value(config, option.name)
        is_read = not readers.isdisjoint(option.read_by)
        for rule in option.facts.rules:
            applies = command in rule.commands if rule.commands else is_read
            applies &= rule.at_default or value != option.default
            if applies and rule.message and not rule.is_met(config):
                # Leave out what an empty value means to other commands.
                meaning = option.facts.doc.partition("; empty")[0]
                problem = rule.message.format(
                    c=config, command=command, default=option.default, meaning=meaning
                )
                raise UserError(f"config.{option.name}={value!r}: {problem}")
    if command in SUPERVISED:
        return
    batch, actor, critic = config.data.train_batch_size, config.actor, config.critic
    sizes = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size}
    for name, mini_batch in sizes.items():
        if mini_batch and batch % mini_batch:
            divisors = (d for d in range(1, batch + 1) if batch % d == 0)
            nearest = min(divisors, key=lambda divisor: abs(divisor - mini_batch))
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is {nearest}"
            )
    if config.rollout.url:
        _require_address("config.rollout.url", config.rollout.url, "JAX_PPO_ROLLOUT_KEY")
    if ENVIRONMENT_IS_SERVER.is_met(config):
        name, url = "rollout.multi_turn.environment", config.rollout.multi_turn.environment
        _require_address(f"config.{name}", url, "JAX_PPO_ENVIRONMENT_KEY")
    if config.reward.url:
        _require_address("config.reward.url", config.reward.url, "JAX_PPO_REWARD_KEY", True)


def _require_address(option: str, url: str, key_variable: str, has_path: bool = False) -> None:
    """Raise `UserError` unless `url` is a server's address without secrets; never quote a query."""
    form = "HOST/PATH" if has_path else "HOST:PORT"
    query = "a key in its query" if has_path else "a query"
    problem = f"expected http://{form} or https://{form}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address &= parts.port is None or parts.port > 0
    except ValueError:
        raise UserError(f"{option}: {problem}") from None
    has_secret = bool(_SECRET.search(parts.query)) if has_path else bool(parts.query)
    if parts.username or parts.password or has_secret:
        raise UserError(
            f"{option}: the address contains a user name, a password or {query}; set the "
            f"environment variable {key_variable} instead"
        )
    if not is_address:
        shown = "" if "@" in url else f"={url!r}"
        raise UserError(f"{option}{shown}: {problem}")


def train_notes(config: Config) -> list[str]:
    """Return notes for a `train` run: easily missed biases, and options without an effect."""
    algorithm, rollout = config.algorithm, config.rollout
    notes = list(_note_losses(config.actor, algorithm, config.updates_once))
    if rollout.truncates:  # trl#6789, verl#6240
        notes.append(
            "config.rollout.top_k, top_p and min_p truncate the distribution that is sampled from, "
            "while log-probs and ratios are of the full one: training is off-policy to that "
            "extent"
        )
    path = config.model.lora.path
    restrains = algorithm.use_kl_in_reward or config.actor.use_kl_loss
    if path and restrains and not config.reference.path:
        notes.append(
            f"config.model.lora.path={path!r}: the reference is the bare base, not the policy "
            f"that training starts from; config.reference.path={path!r} measures the KL to that"
        )
    engine = ROLLOUT_ENGINES.lookup(rollout.engine)
    # A server says at its start whether it takes adapters.
    if config.has_adapters and engine.is_external and not engine.is_server:
        notes.append(
            f"config.rollout.engine={rollout.engine!r}: gets the adapters merged into the weights, "
            "which rounds small changes away in bfloat16; watch rollout/logprob_difference"
        )
    if config.learns_from_files:
        notes.append(
            "config.score.file: each row is one response and is taken as it is; data.train_files, "
            "rollout.n, rollout.keep, rollout.max_staleness, rollout.exact and "
            "algorithm.filter_groups are not read"
        )
    may_have_turns = bool(rollout.multi_turn.environment) or config.learns_from_files
    estimator = algorithm.adv_estimator
    if ADVANTAGE_ESTIMATORS.lookup(estimator).reads_turns and not may_have_turns:
        notes.append(
            f"config.algorithm.adv_estimator={estimator!r}: every response is one turn without a "
            "config.rollout.multi_turn.environment, so algorithm.turn_gamma and turn_lam do "
            "nothing"
        )
    for option in all_options():
        value = option_value(config, option.name)
        noted = [rule for rule in option.facts.rules if rule.is_noted]
        unmet = value != option.default and [x.summary for x in noted if not x.is_met(config)]
        if unmet:
            notes.append(
                f"config.{option.name}={value!r} has no effect with the other options: it is "
                f"read only if {' and '.join(unmet)}"
            )
    # A critic's run takes the configuration of the run that it is for.
    commands = ("train", "critic") if config.trainer.critic_only else ("train",)
    return [*notes, *note_unread_options(config, *commands)]


def _note_losses(actor: Actor, algorithm: Algorithm, updates_once: bool) -> Iterator[str]:
    """Yield notes on losses and KLs that are biased, or do not restrain the policy."""
    penalty = algorithm.kl_penalty
    if algorithm.use_kl_in_reward and not KL_ESTIMATORS.lookup(penalty).unbiased_in_reward:
        unbiased = " and ".join(KL_ESTIMATORS.names(lambda entry: entry.unbiased_in_reward))
        yield (
            f"config.algorithm.kl_penalty={penalty!r}: in the reward only {unbiased} "
            "follows the gradient of the KL; kernels/kl.py describes the others"
        )
    if actor.use_kl_loss and not KL_ESTIMATORS.lookup(actor.kl_loss_type).restrains_in_loss:
        yield (
            f"config.actor.kl_loss_type={actor.kl_loss_type!r}: its expected gradient is 0, so it "
            "does not restrain the policy; k2 does"
        )
    loss = POLICY_LOSSES.lookup(actor.policy_loss)
    # A range that the user set is intended, whatever its size.
    sets_range = actor.clip_ratio_low is not None or actor.clip_ratio_high is not None
    if loss.authors_clip and not sets_range:
        low, high = loss.authors_clip
        yield (
            f"config.actor.policy_loss={loss.name!r}: config.actor.clip_ratio={actor.clip_ratio} "
            "is meant for the ratio of a token; its authors use "
            f"clip_ratio_low={low} and clip_ratio_high={high}"
        )
    if loss.needs_one_update and not updates_once:
        yield (
            f"config.actor.policy_loss={loss.name!r}: is biased once the policy has changed; it is "
            "meant for one optimizer step per rollout"
        )


def note_unread_options(config: Config, *commands: str) -> Iterator[str]:
    """Yield a note for each changed option that belongs to none of these commands."""
    for option in all_options():
        value = option_value(config, option.name)
        if value != option.default and not {*commands} & {*option.read_by}:
            # Other commands take a configuration of train.
            commands_of_option = ("train",) if "train" in option.read_by else option.read_by
            readers = " and ".join(f"jax_ppo.{reader}" for reader in commands_of_option)
            yield f"config.{option.name}={value!r} is not read: it belongs to {readers}"


def note_long_warmups(
    total_steps: int, critic_warmup: int, optims: Mapping[str, Optim]
) -> Iterator[str]:
    """Yield notes if the run ends before a model, by section, is trained at its full rate."""
    for section, optim in optims.items():
        steps = total_steps - critic_warmup * (section == "actor")
        if steps <= 0:
            yield (
                f"config.trainer.critic_warmup={critic_warmup}: the actor is never trained in "
                f"{counted(total_steps, 'step')}"
            )
        elif optim.lr_warmup_steps > steps:
            yield (
                f"config.{section}.optim.lr_warmup_steps={optim.lr_warmup_steps}: in "
                f"{counted(steps, 'step')} the learning rate only rises to "
                f"{optim.lr * steps / optim.lr_warmup_steps:.2g}, not to lr={optim.lr:g}"
            )
