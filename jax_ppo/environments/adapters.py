"""Adapters of Gymnasium's and OpenEnv's environments, whose observations and actions are texts.

Those with Gymnasium's methods are recognized by `reset(self, *, seed, options)`; nothing is
imported from Gymnasium. Those behind HTTP have the form of OpenEnv's `reset` and `step`:

    POST URL/reset  {"episode_id", "seed", "prompt", "ground_truth", "data_source", "extra_info"}
           replies  {"observation"}, optionally "repeatable"
    POST URL/step   {"episode_id", "action"}, and "turn", from 0, if `reset` replied "repeatable"
           replies  {"observation", "reward", "done"}, optionally "info"

A reward of null is 0; `terminated` and `truncated` may stand in for `done`. A server whose
`repeatable` is true gives the same reply to a turn that it gets again. Each dialogue is an episode
with its own id; episodes are stepped concurrently.
"""

import dataclasses
import inspect
import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.data.messages import quote_cell
from jax_ppo.environments.protocol import ENVIRONMENT_OPTION, EnvironmentLost
from jax_ppo.http_client import HTTPClient, RequestFault
from jax_ppo.types import Example

SEED_COLUMN = "seed"
KEY_VARIABLE = "JAX_PPO_ENVIRONMENT_KEY"
MAX_FAULTS = 64  # consecutive failed calls, repetitions included, that end a run

Turn = tuple[str, float, bool, dict[str, float]]


def _describe_example(example: Example) -> dict[str, Any]:
    names = ("prompt", "ground_truth", "data_source", "extra_info")
    return {name: getattr(example, name) for name in names}


def _read_info(info: Mapping[str, Any], metric_names: Sequence[str]) -> dict[str, Any]:
    return {name: info[name] for name in metric_names if info.get(name) is not None}


def has_gymnasium_reset(environment: Any) -> bool:
    """Return whether a class or an object has the `reset` of Gymnasium."""
    try:
        parameters = inspect.signature(environment.reset).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    return "options" in parameters and "example" not in parameters


@dataclasses.dataclass(frozen=True)
class GymnasiumEnvironment:
    """Makes the `TextEnvironment` of each dialogue."""

    name: str  # the value of the option
    make: Callable[[], Any]
    metric_names: tuple[str, ...]  # the numbers of `info` that are reported

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> "GymnasiumDialogue":
        """Return a new environment for one dialogue."""
        return GymnasiumDialogue(self.make(), self.metric_names)


@dataclasses.dataclass(frozen=True)
class GymnasiumDialogue:
    """A `TextEnvironment` around an environment with Gymnasium's methods."""

    environment: Any
    metric_names: Sequence[str]

    def reset(self, example: Example, seed: int) -> str:
        """Begin the dialogue with the row's own seed, if it has one; return what is shown first."""
        row_seed = example.extra_info.get(SEED_COLUMN)
        observation, _ = self.environment.reset(
            seed=seed if row_seed is None else row_seed, options=_describe_example(example)
        )
        if not isinstance(observation, str):
            raise TypeError(
                f"reset returned an observation of type {type(observation).__name__}; expected text"
            )
        return observation

    def step(self, text: str) -> tuple[Any, float, bool, dict[str, float]]:
        """Answer a turn; a truncated episode has ended, too. See `TextEnvironment.step`."""
        observation, reward, terminated, truncated, info = self.environment.step(text)
        return observation, reward, terminated or truncated, _read_info(info, self.metric_names)

    def close(self) -> None:
        """Close the environment, if it can be."""
        getattr(self.environment, "close", lambda: None)()


class RemoteEnvironment:
    """A server of episodes; a call makes the `TextEnvironment` of a new one."""

    def __init__(self, options: MultiTurn, metric_names: tuple[str, ...]) -> None:
        """Take address and limits of options; raise `UserError` for a key that cannot be sent."""
        self.metric_names = metric_names  # the numbers of `info` that are reported
        self._options = options
        self._server = HTTPClient(
            option=f"config.{ENVIRONMENT_OPTION}",
            url=options.environment,
            key_variable=KEY_VARIABLE,
            timeout=options.url_timeout,
            retries=options.url_retries,
        )
        self._lock = threading.Lock()
        self._faults = 0  # consecutive ones
        self._lost = ""

    def __str__(self) -> str:
        return str(self._server)

    def __call__(self) -> "RemoteDialogue":
        """Return a new episode."""
        return RemoteDialogue(self.post, self._options.action_field)

    def post(self, path: str, request: dict[str, Any], is_repeatable: bool) -> Any:
        """Return what the server's reply to `reset` or `step` says, and count faults.

        Raise `RequestFault` if it failed, `EnvironmentLost` after `MAX_FAULTS` faults in a row.
        """
        if self._lost:
            raise EnvironmentLost(self._lost)
        read = {"reset": self._read_start, "step": self._read_turn}[path]
        try:
            reply = self._server.post(f"/{path}", json.dumps(request), is_repeatable, read)
        except RequestFault as fault:
            with self._lock:
                self._faults += 1
                if self._faults < MAX_FAULTS:
                    raise
                self._lost = (
                    f"{self._faults} consecutive calls of the server failed. The last one was "
                    f"/{path}: {fault}"
                )
                raise EnvironmentLost(self._lost) from None
        with self._lock:
            self._faults = 0
        return reply

    def _read_observation(self, reply: Any) -> str:
        if not isinstance(reply, dict) or "observation" not in reply:
            raise ValueError(f"expected an object with observation, got {quote_cell(reply)}")
        observation = reply["observation"]
        field = self._options.observation_field
        if field:
            if not isinstance(observation, dict) or field not in observation:
                raise ValueError(
                    f"expected an observation with {field}, got {quote_cell(observation)}"
                )
            observation = observation[field]
        elif isinstance(observation, dict):
            raise ValueError(
                f"the observation has the fields {', '.join(observation)}; name one by "
                "config.rollout.multi_turn.observation_field"
            )
        if not isinstance(observation, str | None):
            raise ValueError(f"expected text as observation, got {quote_cell(observation)}")
        return observation or ""

    def _read_start(self, reply: Any) -> tuple[str, bool]:
        return self._read_observation(reply), reply.get("repeatable") is True

    def _read_turn(self, reply: Any) -> Turn:
        observation = self._read_observation(reply)
        if "done" in reply:
            ends = reply["done"]
        elif "terminated" in reply:
            ends = reply["terminated"] or reply.get("truncated", False)
        else:
            raise ValueError(f"expected done or terminated, got {quote_cell(reply)}")
        info = reply.get("info") or {}
        if not isinstance(info, dict):
            raise ValueError(f"expected info with names, got {quote_cell(info)}")
        reward = reply.get("reward")
        figures = _read_info(info, self.metric_names)
        return observation, 0.0 if reward is None else reward, ends, figures


@dataclasses.dataclass(eq=False)
class RemoteDialogue:
    """A `TextEnvironment` on a server."""

    post: Callable[[str, dict[str, Any], bool], Any]  # see `RemoteEnvironment`
    action_field: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    is_repeatable: bool = False
    turns: int = 0

    def reset(self, example: Example, seed: int) -> str:
        """Begin the episode; return its first observation. See `TextEnvironment.reset`."""
        request = {"episode_id": self.id, "seed": seed, **_describe_example(example)}
        observation: str
        observation, self.is_repeatable = self.post("reset", request, True)
        return observation

    def step(self, text: str) -> Turn:
        """Answer a turn. See `TextEnvironment.step`."""
        action = {self.action_field: text} if self.action_field else text
        request: dict[str, Any] = {"episode_id": self.id, "action": action}
        if self.is_repeatable:
            request["turn"] = self.turns
        # A server that did not answer may have acted: only one that knows the turn gets it again.
        turn: Turn = self.post("step", request, self.is_repeatable)
        self.turns += 1
        return turn
