"""Options whose text says more than one thing: sets of projections, and values that change over the steps."""

import math

from jax_ppo.config.schema import LORA_TARGETS
from jax_ppo.errors import did_you_mean


def parse_lora_targets(text: str) -> tuple[str, ...]:
    """The projections that model.lora.targets names, in LORA_TARGETS' order. Raises ValueError for one that is none."""
    names = {name.strip() for name in text.split(",")}
    if names == {"all-linear"}:
        return LORA_TARGETS
    for name in sorted(names.difference(LORA_TARGETS)):
        raise ValueError(
            f"expected all-linear alone, or some of {', '.join(LORA_TARGETS)}, got {name!r}."
            f"{did_you_mean(name, LORA_TARGETS)}"
        )
    return tuple(name for name in LORA_TARGETS if name in names)


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
    """Points from text such as "0:0.01,200:0": STEP:VALUE, steps integers >= 0 and increasing, values finite and >= 0.

    Raises:
      ValueError: with what is wrong with which part.
    """
    points = []
    for part in text.split(","):
        step, _, value = part.partition(":")
        try:
            points.append((int(step), float(value)))
        except ValueError:
            raise ValueError(
                f"{part!r} in {text!r} is not STEP:VALUE, as in 0:0.01,200:0"
            ) from None
        step, value = points[-1]
        if step < 0:
            raise ValueError(f"step {step} in {text!r} is below 0")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"value {value} in {text!r} is not a finite number of at least 0")
        if len(points) > 1 and step <= points[-2][0]:
            raise ValueError(f"step {step} in {text!r} does not come after step {points[-2][0]}")
    return tuple(points)
