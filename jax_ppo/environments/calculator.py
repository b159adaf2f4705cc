"""A calculator: it continues an arithmetic expression that the policy ends with `=`.

    policy    Natalia sold 48/2=
    answer    24
    policy     clips in May. #### 72

The turn ends at the `=`, which `rollout.stop` names. GSM8K's own notation, `<<48/2=24>>`, is
answered as well. A turn that does not end with `=` is the last one. The environment gives no
rewards; the whole response gets one.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from jax_ppo.types import Example

LONGEST = 64  # characters of an expression

# Never right after an operator or a name, whose operand its first number would be.
_EXPRESSION = re.compile(r"(?<![\w^%!)*/+.,$(-])([\d.,+\-*/() $]+)=\s*\Z")
_TIMES = re.compile(r"(?<=[\d)])\s*[x×]\s*(?=[\d($])")
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """A `TextEnvironment` that answers expressions with their values."""

    def reset(self, example: Example, seed: int) -> None:
        """Do nothing: a calculator has no state."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a turn. See `TextEnvironment.step`."""
        if text.rstrip().endswith("="):
            return calculate(text), 0.0, False
        return "", 0.0, True


def calculate(text: str) -> str:
    """Return the value of the expression before the `=` at the end of a text; "" if it has none.

    Numbers before the expression that are not part of it are ignored. Values are rounded to four
    decimal places.
    """
    text = _TIMES.sub("*", text).replace("÷", "/").replace("\u2212", "-")
    match = _EXPRESSION.search(text, max(0, len(text) - LONGEST))
    if match is None:
        return ""
    # Remove the commas of thousands and the dollar signs of prices.
    characters = re.sub(r"(?<=\d),(?=\d{3})|\$", "", match[1])
    words = characters.split()
    for first, word in enumerate(words):
        if word in "+-" or (first and words[first - 1][-1] in "+-*/("):
            continue  # what is left out would have this number as an operand
        try:
            value = _evaluate(ast.parse(" ".join(words[first:]), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            continue
        # A float would round long integers.
        scaled = round(value * 10**4)
        whole, decimals = divmod(abs(scaled), 10**4)
        return f"{'-' * (scaled < 0)}{whole}.{decimals:04d}".rstrip("0").rstrip(".")
    return ""


def _evaluate(node: ast.AST) -> Fraction:
    """Return the value of numbers joined by + - * /; raise `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError(ast.dump(node))
