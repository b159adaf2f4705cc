"""Parse text-valued options: sets of projections, loggers, strings and biases.

A function that refuses a text raises `ValueError`, which names the part and what is wrong with it.
"""

import json

from jax_ppo.config.schema import LORA_TARGETS
from jax_ppo.errors import did_you_mean


def parse_lora_targets(text: str) -> tuple[str, ...]:
    """Return the projections that `model.lora.targets` names, in the order of LORA_TARGETS."""
    names = {name.strip() for name in text.split(",")}
    if names == {"all-linear"}:
        return LORA_TARGETS
    for name in sorted(names.difference(LORA_TARGETS)):
        raise ValueError(
            f"expected all-linear alone, or some of {', '.join(LORA_TARGETS)}, got {name!r}."
            f"{did_you_mean(name, LORA_TARGETS)}"
        )
    # The order does not depend on the text, since the result is part of a static argument.
    return tuple(name for name in LORA_TARGETS if name in names)


def is_bracketed(text: str) -> bool:
    """Return whether a text is written as a list or a tuple."""
    return text[:1] + text[-1:] in ("[]", "()")


def split_items(text: str) -> list[str]:
    """Return the items of a list such as "['a','b']" or "a,b"; of a single value, itself."""
    if is_bracketed(text):
        text = text[1:-1]
    return [item.strip(" '\"") for item in text.split(",")]


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a list that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_strings(text: str) -> tuple[str, ...]:
    """Return the strings of a JSON list such as `["END", "Stop:"]`; other text is one string."""
    if not text:
        return ()
    if not text.startswith("["):
        return (text,)
    try:
        items = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON list: {error}") from None
    for item in items:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{item!r} in {text!r} is empty or not text")
    return tuple(items)
