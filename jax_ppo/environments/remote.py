"""Environments behind HTTP, in the form of OpenEnv's `reset` and `step`.

    POST URL/reset  {"episode_id", "seed", "prompt", "ground_truth", "data_source", "extra_info"}
    POST URL/step   {"episode_id", "action"}

Both return an object with `observation`; that of `step` also has `reward` (null is 0), `done` (or
`terminated` and `truncated`) and, if there are any, `info`, whose `new_context` replaces the
context (`protocol.NewContext`). Each dialogue is an episode with its
own id; episodes are stepped concurrently.
"""

import json
import threading
import uuid
from typing import Any

from jax_ppo.config.schema import MultiTurn
from jax_ppo.environments.protocol import EnvironmentLost, NewContext, describe_example, read_info
from jax_ppo.errors import shorten
from jax_ppo.json_server import JSONServer, RequestFault
from jax_ppo.types import Example

KEY_VARIABLE = "JAX_PPO_ENVIRONMENT_KEY"

Turn = tuple[str | NewContext, float, bool, dict[str, float]]


class RemoteEnvironment:
    """A server of episodes; a call makes the `TextEnvironment` of a new one.

    Attributes:
      metric_names: the numbers of `info` that are reported.
    """

    def __init__(self, options: MultiTurn, metric_names: tuple[str, ...], option: str) -> None:
        """Take the address and limits from `config.rollout.multi_turn`; nothing is sent yet.

        Raises:
          UserError: the server's key cannot be sent.
        """
        self.metric_names = metric_names
        self._options = options
        self._server = JSONServer(
            option=f"config.{option}",
            url=options.environment,
            key_variable=KEY_VARIABLE,
            timeout=options.url_timeout,
            retries=options.url_retries,
        )
        self._lock = threading.Lock()
        self._faults = 0  # consecutive ones
        self._lost = ""

    def __str__(self) -> str:
        """Return the address, without what may be secret."""
        return str(self._server)

    def __call__(self) -> "RemoteDialogue":
        """Return a new episode."""
        return RemoteDialogue(self)

    def reset(self, episode: str, example: Example, seed: int) -> str:
        """Begin an episode; return its first observation."""
        request = {"episode_id": episode, "seed": seed, **describe_example(example)}
        observation: str = self._post("reset", request, self._read_observation, is_repeatable=True)
        return observation

    def step(self, episode: str, text: str) -> Turn:
        """Return the answer to a turn. See `TextEnvironment.step`."""
        field = self._options.action_field
        request = {"episode_id": episode, "action": {field: text} if field else text}
        # A server that did not answer may have acted.
        turn: Turn = self._post("step", request, self._read_turn, is_repeatable=False)
        return turn

    def _post(self, path: str, request: dict[str, Any], read: Any, is_repeatable: bool) -> Any:
        """Return the server's reply, and count faults.

        Raises:
          EnvironmentLost: this was the last of too many consecutive faults, or there were.
          RequestFault: the call failed.
        """
        if self._lost:
            raise EnvironmentLost(self._lost)
        try:
            reply = self._server.post(json.dumps(request), path, is_repeatable, read)
        except RequestFault as fault:
            with self._lock:
                self._faults += 1
                if self._faults < self._options.max_faults:
                    raise
                self._lost = (
                    f"{self._faults} consecutive calls of the server failed "
                    f"(config.rollout.multi_turn.max_faults). The last one was /{path}: {fault}"
                )
                raise EnvironmentLost(self._lost) from None
        with self._lock:
            self._faults = 0
        return reply

    def _read_observation(self, reply: Any) -> str:
        if not isinstance(reply, dict) or "observation" not in reply:
            raise ValueError(f"expected an object with observation, got {_quote(reply)}")
        observation = reply["observation"]
        field = self._options.observation_field
        if field:
            if not isinstance(observation, dict) or field not in observation:
                raise ValueError(f"expected an observation with {field}, got {_quote(observation)}")
            observation = observation[field]
        elif isinstance(observation, dict):
            raise ValueError(
                f"the observation has the fields {', '.join(observation)}; name one by "
                "config.rollout.multi_turn.observation_field"
            )
        return "" if observation is None else observation

    def _read_turn(self, reply: Any) -> Turn:
        observation: Any = self._read_observation(reply)
        if "done" in reply:
            ends = reply["done"]
        elif "terminated" in reply:
            ends = reply["terminated"] or reply.get("truncated", False)
        else:
            raise ValueError(f"expected done or terminated, got {_quote(reply)}")
        info = reply.get("info") or {}
        if not isinstance(info, dict):
            raise ValueError(f"expected info with names, got {_quote(info)}")
        reward = reply.get("reward")
        observation, figures = read_info(observation, info, self.metric_names)
        return observation, 0.0 if reward is None else reward, ends, figures


class RemoteDialogue:
    """A `TextEnvironment` on a server."""

    def __init__(self, environment: RemoteEnvironment) -> None:
        """Give the episode an id that no other one has."""
        self._environment = environment
        self._id = uuid.uuid4().hex

    def reset(self, example: Example, seed: int) -> str:
        """Begin the episode; return its first observation. See `TextEnvironment.reset`."""
        return self._environment.reset(self._id, example, seed)

    def step(self, text: str) -> Turn:
        """Answer a turn. See `TextEnvironment.step`."""
        return self._environment.step(self._id, text)


def _quote(value: Any) -> str:
    return shorten(repr(value))
