"""Environments with Gymnasium's methods, whose observations and actions are texts.

Nothing is imported from Gymnasium: a class is recognized by `reset(self, *, seed, options)`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jax_ppo.environments.protocol import describe_example, read_info
from jax_ppo.types import Example

SEED_COLUMN = "seed"


def has_gymnasium_reset(environment: Any) -> bool:
    """Return whether a class or an object has the `reset` of Gymnasium."""
    try:
        parameters = inspect.signature(environment.reset).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return "options" in parameters and "example" not in parameters


class GymnasiumEnvironment:
    """Makes the `TextEnvironment` of each dialogue.

    Attributes:
      metric_names: the numbers of `info` that are reported.
    """

    def __init__(self, name: str, make: Callable[[], Any], metric_names: Sequence[str]) -> None:
        """Store the value of the option and what makes an environment for each dialogue."""
        self.metric_names = tuple(metric_names)
        self._name = name
        self._make = make

    def __str__(self) -> str:
        """Return the name in the option."""
        return self._name

    def __call__(self) -> "GymnasiumDialogue":
        """Return a new environment for one dialogue."""
        return GymnasiumDialogue(self._make(), self.metric_names)


class GymnasiumDialogue:
    """A `TextEnvironment` around an environment with Gymnasium's methods."""

    def __init__(self, environment: Any, metric_names: Sequence[str]) -> None:
        """Wrap an environment that was not used yet."""
        self._environment = environment
        self._metric_names = metric_names

    def reset(self, example: Example, seed: int) -> str:
        """Begin the dialogue with the row's own seed, if it has one; return what is shown first."""
        observation, _ = self._environment.reset(
            seed=example.extra_info.get(SEED_COLUMN, seed), options=describe_example(example)
        )
        if not isinstance(observation, str):
            raise TypeError(
                f"reset returned an observation of type {type(observation).__name__}; expected text"
            )
        return observation

    def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        """Answer a turn; a truncated episode has ended, too. See `TextEnvironment.step`."""
        observation, reward, terminated, truncated, info = self._environment.step(text)
        observation, figures = read_info(observation, info, self._metric_names)
        return observation, reward, terminated or truncated, figures

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()
