"""Types shared by the steps that turn a rollout into experience."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float32

from jax_ppo.config.schema import Algorithm, Config, Reward

Metrics = dict[str, jax.Array]
Tokens = Float32[Array, "B T"]
Mask = Bool[Array, "B T"]


@dataclasses.dataclass(frozen=True)
class ExperienceOptions:
    """Options of `estimate_experience`; a static argument of the compiled function.

    Attributes:
      algorithm: the section of the config.
      reward: the section of the config.
      max_response_length: T, the length beyond which responses are cut off.
      responses_per_prompt: n, the size of the groups that are compared without a critic.
      has_critic: advantages come from a critic.
      whitens_advantages: advantages are whitened over the rollout.
      normalizes_values: the critic learns normalized returns.
    """

    algorithm: Algorithm
    reward: Reward
    max_response_length: int
    responses_per_prompt: int
    has_critic: bool
    whitens_advantages: bool
    normalizes_values: bool

    @classmethod
    def from_config(cls, config: Config) -> "ExperienceOptions":
        """Collect the options from all sections."""
        return cls(
            algorithm=config.algorithm,
            reward=config.reward,
            max_response_length=config.data.max_response_length,
            responses_per_prompt=config.responses_per_prompt,
            has_critic=config.has_critic,
            whitens_advantages=config.whitens_advantages,
            normalizes_values=config.critic.normalize_values,
        )


class Masks(NamedTuple):
    """Masks over the tokens and samples of a rollout.

    Attributes:
      actions: the response tokens that the policy chose.
      samples: False for samples that are excluded from all losses.
      loss: the action tokens of the samples that are not excluded.
    """

    actions: Mask
    samples: Bool[Array, " B"]
    loss: Mask


class Estimates(NamedTuple):
    """Advantages, raw or whitened, and the critic's targets (`None` without a critic)."""

    advantages: Tokens
    returns: Tokens | None
