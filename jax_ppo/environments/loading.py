"""Loading of the environment that `rollout.multi_turn.environment` names."""

from collections.abc import Callable, Sequence
from typing import Any

from jax_ppo.config import plugins
from jax_ppo.config.schema import MultiTurn
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.protocol import validate_metric_names
from jax_ppo.errors import UserError
from jax_ppo.sampler.environment import Environment, PerDialogue
from jax_ppo.types import Example

ENVIRONMENT_OPTION = "rollout.multi_turn.environment"


def load_environment_class(options: MultiTurn) -> Callable[..., Any] | None:
    """Return the class of the environment; `None` if each response is a single turn.

    Raises:
      UserError: it cannot be imported or constructed, or lacks a method.
    """
    name = options.environment
    if not name:
        return None
    environment_class = plugins.load_plugin(
        name, ENVIRONMENT_OPTION, (), by_name=True, other_arguments=_constructor_arguments
    )
    for method in ("reset", "step"):
        if not callable(getattr(environment_class, method, None)):
            raise UserError(
                f"config.{ENVIRONMENT_OPTION}={name!r}: has no method {method}; expected a class "
                "as in jax_ppo/environments/protocol.py"
            )
    names = getattr(environment_class, "metric_names", ())
    validate_metric_names(names, f"config.{ENVIRONMENT_OPTION}={name!r}")
    return environment_class


def _constructor_arguments(environment_class: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments of a `TokenEnvironment`; `None` for one of text, which has none."""
    if _is_in_jax(environment_class):
        return ("tokenizer", "examples")
    return None


def make_environment(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    examples: Sequence[Example],
) -> Environment:
    """Construct the environment for the decode loop.

    Args:
      environment_class: as returned by `load_environment_class`.
      options: `config.rollout.multi_turn`.
      tokenizer: the policy's.
      examples: the rows of the training data, then of the held-out data.
    """
    if _is_in_jax(environment_class):
        dialogues = environment_class(tokenizer=tokenizer, examples=examples)
        return PerDialogue(
            dialogues.reset,
            dialogues.step,
            observation_length=dialogues.observation_length,
            metrics=getattr(dialogues, "metrics", None),
        )
    return HostEnvironment(
        environment_class,
        tokenizer,
        examples,
        observation_length=options.max_observation_length,
        timeout=options.timeout,
        metric_names=getattr(environment_class, "metric_names", ()),
    )


def _is_in_jax(environment_class: Callable[..., Any]) -> bool:
    return hasattr(environment_class, "observation_length")
