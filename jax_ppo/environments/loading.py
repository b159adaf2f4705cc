"""Loading of the environment that `rollout.multi_turn.environment` names."""

from collections.abc import Callable, Sequence
from typing import Any

from jax_ppo.config import plugins
from jax_ppo.config.schema import MultiTurn
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.protocol import EnvironmentLost, validate_metric_names
from jax_ppo.environments.remote import RemoteEnvironment
from jax_ppo.errors import UserError, shorten
from jax_ppo.json_server import RequestFault
from jax_ppo.sampler.environment import Environment, PerDialogue
from jax_ppo.types import Example

ENVIRONMENT_OPTION = "rollout.multi_turn.environment"


def load_environment_class(options: MultiTurn) -> Callable[..., Any] | None:
    """Return the class of the environment, or a server; `None` if each response is a single turn.

    Raises:
      UserError: it cannot be imported or constructed, or lacks a method.
    """
    name = options.environment
    if not name:
        return None
    if name.startswith(("http://", "https://")):
        server = RemoteEnvironment(options, ENVIRONMENT_OPTION)
        validate_metric_names(
            server.metric_names,
            f"config.rollout.multi_turn.info_metrics={options.info_metrics!r}",
        )
        return server
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


def try_first_reset(environment_class: Callable[..., Any] | None, example: Example) -> str:
    """Begin a dialogue whose environment shows something at once, as an adapted one does.

    Args:
      environment_class: the result of `load_environment_class`.
      example: a row of the data.

    Returns:
      A note if the policy does not see what the environment shows first; otherwise "".

    Raises:
      UserError: the server does not answer.
    """
    if not isinstance(environment_class, RemoteEnvironment):
        return ""
    try:
        observation = environment_class().reset(example, 0)
    except (RequestFault, EnvironmentLost) as error:
        raise UserError(str(error)) from error
    prompt = example.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(message["content"] for message in prompt)
    if observation.strip() in prompt:
        return ""
    return (
        f"{environment_class}: the policy does not see what reset returns for a prompt, "
        f"{shorten(observation)!r}, as it is not in the prompt"
    )


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
