"""Parse text-valued options: projections, loggers, dates, strings and reward terms.

A function that refuses a text raises `ValueError`, which names the part and what is wrong with it.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import re
from typing import TypeGuard

from jax_ppo.errors import did_you_mean

LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "shared_expert_gate",  # of an expert that every token passes through
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),  # of Gated DeltaNets
    "in_proj",  # of short convolutions, beside out_proj
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # of latent attention
)
# Groups of parameters that training may leave as they are, by their paths in a decoder.
PARAMETER_GROUPS = {
    "attention": r"^layers/(\w*attention|delta_net|short_conv)/",  # all that mixes tokens
    "embedding": r"^(embed|embed_per_layer|positions)/",
}
LOGGERS = ("console", "tensorboard", "wandb", "mlflow")
# Commas within square brackets belong to an argument.
_COMMA = re.compile(r",(?![^\[\]]*\])")
_TERM = re.compile(r"(?P<rule>[^\[\]]+?)(?:\[(?P<argument>[^\[\]]*)\])?:(?P<weight>[^:\[\]]+)")


def parse_date(text: str) -> datetime.date | None:
    """Return the date that a text such as 2026-01-31 names; `None` for an empty one."""
    return datetime.date.fromisoformat(text) if text else None


def refuse_main(text: str) -> None:
    """Raise `ValueError` if a text names a function of the main module."""
    module, _, name = text.partition(":")
    if module == "__main__":
        raise ValueError(
            "worker processes cannot import a function of a script or notebook: pass it, "
            f"train(config, workdir, reward={name}), or save it in a file and name FILE.py:{name}"
        )


def parse_loggers(text: str) -> tuple[str, ...]:
    """Return the names in `trainer.logger`."""
    names = parse_names(text)
    for name in names:
        if name not in LOGGERS:
            raise ValueError(
                f"expected some of {', '.join(LOGGERS)}, separated by commas."
                f"{did_you_mean(name, LOGGERS)}"
            )
    return names


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


def is_bracketed(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that is written as a list or a tuple."""
    return isinstance(value, str) and value[:1] + value[-1:] in ("[]", "()")


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


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a reward."""

    rule: str  # name of a rule, `auto`, `model`, or `module:function`
    argument: str  # the text in brackets after the name; "" without brackets
    weight: float  # finite

    @property
    def metric(self) -> str:
        """Return the term's name among the metrics: the rule, or the name of the function."""
        return f"{self.rule.rpartition(':')[2]}_term"


def parse_terms(text: str) -> tuple[Term, ...]:
    """Return the terms of `reward.terms`, such as "gsm8k:1.0,format[think,answer]:0.2".

    Raise `ValueError` for a term that is not RULE[ARGUMENT]:WEIGHT, or two of one name.
    """
    terms: list[Term] = []
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        match = _TERM.fullmatch(part)
        weight = math.nan
        if match:
            with contextlib.suppress(ValueError):
                weight = float(match["weight"])
        if match is None or not math.isfinite(weight):
            raise ValueError(
                f"{part!r} is not RULE:WEIGHT, as in gsm8k:1.0, format[think,answer]:0.2, "
                "model:0.5 or my.py:score:0.1"
            )
        refuse_main(match["rule"])
        term = Term(rule=match["rule"], argument=match["argument"] or "", weight=weight)
        if term.metric in {other.metric for other in terms}:
            raise ValueError(f"{term.metric[:-5]!r} occurs twice")
        terms.append(term)
    return tuple(terms)
