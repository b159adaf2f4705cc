"""The calculator evaluates arithmetic, and nothing else."""

import pytest

from jax_ppo.environments.calculator import Calculator, calculate

UNANSWERED = ["9/0=", "2**9=", "9//2=", "()=", "x=", "=", "3+5", "__import__('os')=", "3(4)="]
UNANSWERED += ["2^3=", "20% * 50=", "sqrt(16)+3=", "x - 3="]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3+5=", "8"),
        ("Natalia sold 48/2 =", "24"),
        ("She earns <<$1,000*3=", "3000"),
        ("(1/3)*2=", "0.6667"),
        ("0-7/2=", "-3.5"),
        ("1. 48/2=", "24"),  # the number of a step is no factor
        ("In 5 days 3 x 4÷2=", "6"),
        ("99999999999999999+1=", "100000000000000000"),
    ],
)
def test_the_value_of_the_expression_before_the_sign_is_written(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize("text", UNANSWERED)
def test_what_is_no_arithmetic_is_not_answered(text):
    assert calculate(text) == ""


def test_a_turn_without_the_sign_ends_the_dialogue():
    calculator = Calculator()
    assert calculator.step("3+5=") == ("8", 0.0, False)
    assert calculator.step("so many =") == ("", 0.0, False)
    assert calculator.step("\n#### 8") == ("", 0.0, True)
