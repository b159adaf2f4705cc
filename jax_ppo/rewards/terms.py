"""The terms of `reward.terms`, and the built-in rules that they name."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator

from jax_ppo.errors import UserError
from jax_ppo.rewards.rule_table import RULES, Rule, rule_of_source

AUTO = "auto"  # the term of each row's own rule
MODEL = "model"  # the term of the reward model
JUDGE = "judge"  # the term of the server of `reward.url`

# Commas within square brackets belong to an argument.
_COMMA = re.compile(r",(?![^\[\]]*\])")
_TERM = re.compile(r"(?P<rule>[^\[\]]+?)(?:\[(?P<argument>[^\[\]]*)\])?:(?P<weight>[^:\[\]]+)")


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


def rules_of_source(source: str, terms: tuple[Term, ...]) -> Iterator[tuple[str, Rule | None]]:
    """Yield name and rule of each term that needs a built-in rule, `None` for an unknown one."""
    # Without terms, the rule of the row's source is the only one.
    names = [term.rule for term in terms] or [AUTO]
    for name in names:
        if name == AUTO:
            yield AUTO, RULES.get(rule_of_source(source) or "")
        elif name not in (MODEL, JUDGE) and ":" not in name:
            yield name, RULES.get(name)
