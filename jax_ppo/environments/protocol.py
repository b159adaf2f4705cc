"""The protocols of environments; `rollout.multi_turn.environment` names a class of one of them."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from jax_ppo.errors import UserError, shorten
from jax_ppo.types import Example

FAILED = "failed"  # metric of environments on the host: 1 if a failure ended the dialogue, else 0

# What an environment may raise as a failure of its dialogue alone; awaited code raises the last.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)

_METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


class EnvironmentLost(Exception):
    """The run is to end: a service that all dialogues need is gone.

    Any host environment may raise it. Turns that follow in the batch are not tried.
    """


class TextEnvironment(Protocol):
    """One dialogue, on the host. The class is constructed without arguments, once per dialogue.

    A class may have `close()`. It is called when the dialogue has ended; one that was cut off or
    failed is closed when a dialogue of a later batch takes its place.

    Attributes:
      metric_names: the metrics that turns may report; a class may lack it.
    """

    metric_names: tuple[str, ...] = ()

    def reset(self, example: Example, seed: int) -> None:
        """Begin the dialogue.

        Args:
          example: the row of the data with the prompt of the dialogue.
          seed: 0..2^32 - 1, for all randomness; it depends only on the run's seed, the step and the
            sample, so that a run can be repeated.
        """

    def step(
        self, text: str
    ) -> tuple[str, float, bool] | tuple[str, float, bool, Mapping[str, float]]:
        """Answer a turn.

        Args:
          text: the turn, without special tokens such as the EOS that ended it.

        Returns:
          The observation, which becomes part of the response unchanged; the reward of the turn; and
          whether the dialogue has ended, in which case the observation is ignored. Then, if there
          are any, metrics of the dialogue so far: the last value of each name counts.
        """


class TokenEnvironment(Protocol):
    """All dialogues, in JAX: the methods are traced, and the host is not involved in decoding.

    The class has an attribute `observation_length`, which distinguishes it from a
    `TextEnvironment`. The methods handle one dialogue; `jax.vmap` maps them over all dialogues.
    A class may also have `metrics(state)`, which returns scalars by name from a dialogue's last
    state; NaN means that the dialogue has no such figure.

    Attributes:
      observation_length: O, the maximum number of tokens of an observation.
    """

    observation_length: int

    def __init__(self, tokenizer: Any, examples: Sequence[Example]) -> None:
        """Prepare what the traced methods look up, such as tables of tokens.

        Args:
          tokenizer: the policy's.
          examples: the rows of the training data, then of the held-out data.
        """

    def reset(self, row: jax.Array, key: jax.Array) -> Any:
        """Return the first state, a pytree of arrays.

        Args:
          row: int32, index of the dialogue's example.
          key: the key for all randomness of the dialogue.
        """

    def step(self, state: Any, turn: jax.Array, length: jax.Array) -> tuple[Any, ...]:
        """Answer a turn.

        Args:
          state: the state of the dialogue.
          turn: int32 [U], the tokens of the turn, with the EOS that ended it; 0 past its length.
          length: int32, the number of these tokens.

        Returns:
          The next state; the observation, int32 [O]; its number of tokens; the reward of the turn;
          and whether the dialogue has ended.
        """


def validate_metric_names(names: Any, setting: str) -> None:
    """Raise `UserError` unless the names can name metrics `environment/NAME`.

    The message begins with the setting, "config.OPTION=VALUE".
    """
    if not isinstance(names, (tuple, list)):
        raise UserError(
            f"{setting}: metric_names is {shorten(repr(names))}; expected a tuple of names"
        )
    for name in names:
        if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
            raise UserError(
                f"{setting}: the name of a metric is {shorten(repr(name))}; expected letters, "
                "digits and _ . / -"
            )
        if name == FAILED:
            raise UserError(
                f"{setting}: its metric {name!r} has the name of a built-in one; choose another"
            )
