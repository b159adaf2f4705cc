"""The protocol of environments; `rollout.multi_turn.environment` names a class of it."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Protocol

from jax_ppo.errors import UserError, shorten
from jax_ppo.types import Example

ENVIRONMENT_OPTION = "rollout.multi_turn.environment"
FAILED = "failed"  # metric of all environments: 1 if a failure ended the dialogue, else 0

# What an environment may raise as a failure of its dialogue alone; awaited code raises the last.
FAILURES = (Exception, SystemExit, asyncio.CancelledError)

_METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


class EnvironmentLost(Exception):
    """The run is to end: a service that all dialogues need is gone.

    Any environment may raise it. Turns that follow in the batch are not tried.
    """


class TextEnvironment(Protocol):
    """One dialogue. The class is constructed without arguments, once per dialogue.

    A class may have `close()`. It is called when the dialogue has ended; one that was cut off or
    failed is closed when a dialogue of a later batch takes its place.
    """

    metric_names: tuple[str, ...] = ()  # metrics that turns may report; a class may lack it

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


def validate_metric_names(names: Any, setting: str) -> None:
    """Raise `UserError` about `setting` unless the names can name metrics `environment/NAME`."""
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
