"""Generated word problems of two steps with one-digit numbers: small enough for a model that is made in a minute.

Training and held-out problems are disjoint by their numbers: no three numbers that a held-out problem uses stand in a
training problem in that order, whatever the story around them.
"""

import dataclasses
import functools
import zlib

import numpy as np

from jax_ppo.types import Example

SPLITS = ("train", "heldout")
_PROBLEMS, _SOLUTIONS = (
    101,
    202,
)  # keep their random numbers apart: index 5 of one is not drawn as index 5 of the other
HASTY_RIGHT = 0.15  # probability that the answer given at once is right

_NAMES = (
    ("Tom", "he"),
    ("Ann", "she"),
    ("Ben", "he"),
    ("Mia", "she"),
    ("Sam", "he"),
    ("Eva", "she"),
    ("Max", "he"),
    ("Lea", "she"),
)
_THINGS = (
    ("apple", "apples"),
    ("book", "books"),
    ("coin", "coins"),
    ("pen", "pens"),
    ("toy", "toys"),
    ("egg", "eggs"),
)
_STORIES = {
    "+-": (
        "{Who} buys {second} more and gives {third} away.",
        "{Who} finds {second} more and then loses {third}.",
        "{Who} gets {second} from a friend and sells {third}.",
    ),
    "-+": (
        "{Who} gives {second} away and buys {third} more.",
        "{Who} loses {second} and then finds {third} more.",
        "{Who} sells {second} and gets {third} from a friend.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      numbers: the three operands as they come up, each 1 to 9.
      signs: "+-" or "-+": first number, first sign, second number, second sign, third number.
      question: the problem in words.
    """

    numbers: tuple[int, int, int]
    signs: str
    question: str

    @property
    def between(self) -> int:
        """After the first step, 0 to 9."""
        first, second, _ = self.numbers
        return first + second if self.signs[0] == "+" else first - second

    @property
    def answer(self) -> int:
        """0 to 9."""
        return (
            self.between + self.numbers[2]
            if self.signs[1] == "+"
            else self.between - self.numbers[2]
        )

    @property
    def prompt(self) -> str:
        """Ends with a line break, so that the tokens of a response do not depend on it."""
        return f"Question: {self.question}\nAnswer:\n"

    @property
    def careful(self) -> str:
        """The solution step by step, always right."""
        first, second, third = self.numbers
        return (
            f"{first}{self.signs[0]}{second}={self.between}\n{self.between}{self.signs[1]}{third}={self.answer}\n"
            f"#### {self.answer}"
        )


def generate_problem(index: int, split: str) -> Problem:
    """Problem number `index` >= 0 of "train" or "heldout", always the same. Two indices may share their numbers."""
    if index < 0 or split not in SPLITS:
        raise ValueError(
            f"index={index}, split={split!r}: expected an index of at least 0 and one of {SPLITS}"
        )
    rng = np.random.default_rng([_PROBLEMS, SPLITS.index(split), index])
    signs = ("+-", "-+")[rng.integers(2)]
    choices = _triples(signs, split)
    numbers = choices[rng.integers(len(choices))]
    name, who = _NAMES[rng.integers(len(_NAMES))]
    one, many = _THINGS[rng.integers(len(_THINGS))]
    happening = _STORIES[signs][rng.integers(len(_STORIES[signs]))]
    first, second, third = numbers
    happening = happening.format(Who=who.capitalize(), second=second, third=third)
    question = f"{name} has {first} {one if first == 1 else many}. {happening} How many {many} does {who} have now?"
    return Problem(numbers, signs, question)


def generate_arithmetic_examples(
    count: int, split: str = "train", offset: int = 0
) -> list[Example]:
    """Problems offset .. offset + count - 1 of "train" or "heldout" with their answers, of data_source "arithmetic"."""
    made = ((index, generate_problem(index, split)) for index in range(offset, offset + count))
    return [
        Example(
            prompt=p.prompt,
            data_source="arithmetic",
            ground_truth=str(p.answer),
            response=p.careful,
            extra_info={"index": index, "split": split, "solution": p.careful},
        )
        for index, p in made
    ]


def generate_worked_solutions(count: int, careful_share: float, seed: int) -> list[tuple[str, str]]:
    """Training problems with a response each, for a supervised warm-up that knows the form but seldom takes its time.

    Args:
      count: how many, from the training problems 0 .. count - 1.
      careful_share: probability that a response is solved step by step, and so right. The others give an answer at
        once, right with probability HASTY_RIGHT and otherwise off by 1 to 3.
      seed: of the choice between the two and of the wrong answers.

    Returns:
      (prompt, response) pairs of text; the end-of-sequence token is the caller's to add.
    """
    pairs = []
    for index in range(count):
        rng, p = np.random.default_rng([_SOLUTIONS, seed, index]), generate_problem(index, "train")
        response = p.careful if rng.random() < careful_share else f"#### {_hasty(p.answer, rng)}"
        pairs.append((p.prompt, response))
    return pairs


def _hasty(answer, rng):
    if rng.random() < HASTY_RIGHT:
        return answer
    return int(
        rng.choice(
            [wrong for off in (1, 2, 3) for wrong in (answer - off, answer + off) if wrong >= 0]
        )
    )


@functools.cache
def _triples(signs, split):
    """The numbers that keep both steps within one digit, and belong to the split."""
    digits = range(1, 10)
    return [
        numbers
        for numbers in ((a, b, d) for a in digits for b in digits for d in digits)
        if _held_out(numbers) == (split == "heldout") and _one_digit(Problem(numbers, signs, ""))
    ]


def _one_digit(p):
    return 0 <= p.between <= 9 and 0 <= p.answer <= 9


def _held_out(numbers):
    """One in eight, whatever the signs."""
    return zlib.crc32(bytes(numbers)) % 8 == 0
