"""Validate options against each other: apply the rules that the schema states.

Names, types and ranges of single options are validated in loading.py. Functions raise `UserError`
at the first problem.
"""

import urllib.parse
from collections.abc import Iterable
from typing import Any

from jax_ppo.config.option import SUPERVISED, option_value
from jax_ppo.config.option_rules import ENVIRONMENT_IS_SERVER
from jax_ppo.config.schema import Actor, Config, Critic, Data, all_options, options_by_name
from jax_ppo.errors import UserError


def validate_config(config: Config, command: str) -> None:
    """Validate the options of a command; raise `UserError` on the first problem."""
    validate_rules(config, command)
    rollout, reward = config.rollout, config.reward
    if command in SUPERVISED:
        return
    _validate_batches(config.data, config.actor, config.critic)
    if rollout.url:
        _require_address("config.rollout.url", rollout.url, "JAX_PPO_ROLLOUT_KEY")
    if ENVIRONMENT_IS_SERVER.is_met(config):
        option, url = "config.rollout.multi_turn.environment", rollout.multi_turn.environment
        _require_address(option, url, "JAX_PPO_ENVIRONMENT_KEY")
    if reward.url:
        _require_address("config.reward.url", reward.url, "JAX_PPO_REWARD_KEY", True)


def validate_rules(config: Config, command: str) -> None:
    """Raise `UserError` for the first option, in the schema's order, that breaks a rule."""
    # The others take a configuration of train.
    readers = {command} if command in SUPERVISED else {command, "train"}
    for option in all_options():
        value = option_value(config, option.name)
        for rule in option.facts.rules:
            applies = command in rule.commands or (
                not rule.commands and not readers.isdisjoint(option.read_by)
            )
            if value == option.default and not rule.at_default:
                applies = False
            if applies and rule.message and not rule.is_met(config):
                # The meaning of an empty value to other commands does not help here.
                meaning = option.facts.doc.partition("; empty")[0]
                problem = rule.message.format(
                    c=config, command=command, default=option.default, meaning=meaning
                )
                raise UserError(f"config.{option.name}={value!r}: {problem}")


def default_values(names: Iterable[str]) -> dict[str, Any]:
    """Return the defaults of options by their dotted names."""
    return {name: options_by_name()[name].default for name in names}


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
