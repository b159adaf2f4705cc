"""Parsing of `reward.terms`: the terms that the reward adds up, and their weights."""

import contextlib
import dataclasses
import math
import re

from jax_ppo.errors import UserError

AUTO = "auto"  # the term of each row's own rule
MODEL = "model"  # the term of the reward model
JUDGE = "judge"  # the term of the server of `reward.url`

# Commas within square brackets belong to an argument.
_COMMA = re.compile(r",(?![^\[\]]*\])")
_TERM = re.compile(r"(?P<rule>[^\[\]]+?)(?:\[(?P<argument>[^\[\]]*)\])?:(?P<weight>[^:\[\]]+)")


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a reward.

    Attributes:
      rule: name of a rule, `auto`, `model`, or `module:function`.
      argument: the text in brackets after the name; "" without brackets.
      weight: finite.
    """

    rule: str
    argument: str
    weight: float

    @property
    def metric(self) -> str:
        """Return the term's name among the metrics: the rule, or the name of the function."""
        return f"{self.rule.rpartition(':')[2]}_term"


def parse_terms(text: str) -> tuple[Term, ...]:
    """Return the terms of `reward.terms`, such as "gsm8k:1.0,format[think,answer]:0.2".

    Raises:
      UserError: a term is not RULE:WEIGHT or RULE[ARGUMENT]:WEIGHT, or two have the same name.
    """
    terms: list[Term] = []
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        match = _TERM.fullmatch(part)
        weight = math.nan
        if match:
            with contextlib.suppress(ValueError):
                weight = float(match["weight"])
        if match is None or not math.isfinite(weight):
            raise UserError(
                f"config.reward.terms={text!r}: {part!r} is not RULE:WEIGHT, as in gsm8k:1.0, "
                "format[think,answer]:0.2, model:0.5 or my.py:score:0.1"
            )
        term = Term(rule=match["rule"], argument=match["argument"] or "", weight=weight)
        if term.metric in {other.metric for other in terms}:
            raise UserError(f"config.reward.terms={text!r}: {term.metric[:-5]!r} occurs twice")
        terms.append(term)
    return tuple(terms)
