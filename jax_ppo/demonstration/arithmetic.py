"""Generated two-step word problems with one-digit numbers, for models that train in a minute.

Training and held-out problems are disjoint by their operands: no operand triple of a held-out
problem occurs, in that order, in a training problem, whatever the story around it. Sums of two
two-digit numbers and calculations in words, asked in chats of small pretrained models, are
disjoint, too: one pair of numbers in ten is held out. So are words whose letters are counted.
"""

import dataclasses
import functools
import itertools
import string
import zlib

import numpy as np

from jax_ppo.types import Example

SPLITS = ("train", "heldout")

# Seeds of separate random streams: index 5 of one does not draw the numbers of the other.
_PROBLEM_STREAM = 101
_SUM_STREAM = 303
_CALCULATION_STREAM = 404
_COUNT_STREAM = 505

_NAMES = ("Tom", "Ann", "Ben", "Mia", "Sam", "Eva", "Max", "Lea")
_PRONOUNS = ("he", "she")  # of the names, in turn
_THINGS = ("apple", "book", "coin", "pen", "toy", "egg")
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
    """One word problem."""

    numbers: tuple[int, int, int]  # the three operands in order of appearance, each 1 to 9
    signs: str  # "+-" or "-+", the operators between the three operands
    question: str  # the problem in words

    @property
    def intermediate(self) -> int:
        """Return the result of the first step, 0 to 9."""
        first, second, _ = self.numbers
        return _add_or_subtract(first, self.signs[0], second)

    @property
    def answer(self) -> int:
        """Return the final result, 0 to 9."""
        return _add_or_subtract(self.intermediate, self.signs[1], self.numbers[2])

    @property
    def prompt(self) -> str:
        """Return the prompt; its final line break keeps it from changing a response's tokens."""
        return f"Question: {self.question}\nAnswer:\n"

    @property
    def worked_solution(self) -> str:
        """Return the solution step by step, always right."""
        first, second, third = self.numbers
        return (
            f"{first}{self.signs[0]}{second}={self.intermediate}\n"
            f"{self.intermediate}{self.signs[1]}{third}={self.answer}\n"
            f"#### {self.answer}"
        )


def _add_or_subtract(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


@functools.lru_cache(maxsize=2**14)
def generate_problem(index: int, split: str) -> Problem:
    """Return problem `index`, 0 or more, of "train" or "heldout"; two may share operands."""
    # Each problem has a separate stream, so that it does not depend on those before it.
    rng = np.random.default_rng([_PROBLEM_STREAM, SPLITS.index(split), index])
    signs = ("+-", "-+")[rng.integers(2)]
    choices = _split_operands(signs, split)
    numbers = choices[rng.integers(len(choices))]
    number = rng.integers(len(_NAMES))
    name, pronoun = _NAMES[number], _PRONOUNS[number % 2]
    thing = _THINGS[rng.integers(len(_THINGS))]
    story_template = _STORIES[signs][rng.integers(len(_STORIES[signs]))]
    first, second, third = numbers
    story = story_template.format(Who=pronoun.capitalize(), second=second, third=third)
    question = (
        f"{name} has {first} {thing}{'s' * (first > 1)}. {story} "
        f"How many {thing}s does {pronoun} have now?"
    )
    return Problem(numbers=numbers, signs=signs, question=question)


def generate_arithmetic_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Return problems 0 .. count - 1, of data_source "arithmetic"; the seed is ignored."""
    del seed
    examples = []
    for index in range(count):
        problem = generate_problem(index, split)
        solution = problem.worked_solution
        example = Example(
            prompt=problem.prompt,
            data_source="arithmetic",
            ground_truth=str(problem.answer),
            response=solution,
            extra_info={"index": index, "split": split, "solution": solution},
        )
        examples.append(example)
    return examples


@functools.cache
def _split_operands(signs: str, split: str) -> list[tuple[int, int, int]]:
    """Return the operand triples of a split that keep both steps within one digit."""
    digits = range(1, 10)
    triples = itertools.product(digits, digits, digits)
    # One triple in eight is held out, whatever the operators.
    chosen = [x for x in triples if (zlib.crc32(bytes(x)) % 8 == 0) == (split == "heldout")]
    problems = [Problem(numbers=numbers, signs=signs, question="") for numbers in chosen]
    return [p.numbers for p in problems if 0 <= p.intermediate <= 9 and 0 <= p.answer <= 9]


def generate_sum_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Return sums, drawn with replacement, of data_source "sums"; the seed is ignored."""
    del seed
    pairs = [
        (a, b)
        for a, b in itertools.product(range(10, 100), repeat=2)
        if (zlib.crc32(bytes((a, b))) % 10 == 0) == (split == "heldout")
    ]
    rng = np.random.default_rng([_SUM_STREAM, split == "heldout"])
    examples = []
    for draw in rng.integers(len(pairs), size=count):
        first, second = pairs[draw]
        question = f"What is {first} + {second}? Answer with the number only."
        prompt = ({"role": "user", "content": question},)
        examples.append(Example(prompt, data_source="sums", ground_truth=str(first + second)))
    return examples


def generate_calculation_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Return calculations in words, of data_source "sums", with solutions by a calculator.

    A solution has an expression, `=`, its value and the answer. The seed is ignored.
    """
    del seed
    rng = np.random.default_rng([_CALCULATION_STREAM, split == "heldout"])
    examples: list[Example] = []
    while len(examples) < count:
        first, second, third = (int(rng.integers(low, 10 * low)) for low in (100, 10, 100))
        sign, word = (("+", "plus"), ("-", "minus"))[rng.integers(2)]
        if (zlib.crc32(f"{first} {second}".encode()) % 10 == 0) != (split == "heldout"):
            continue
        answer = _add_or_subtract(first * second, sign, third)
        example = Example(
            prompt=(
                {"role": "user", "content": f"What is {first} times {second} {word} {third}?"},
            ),
            data_source="sums",
            ground_truth=str(answer),
            response=f"{first} * {second} {sign} {third} ={answer}. The answer is {answer}.",
        )
        examples.append(example)
    return examples


def generate_count_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    r"""Return words of 5 to 20 letters to count one in, of data_source "char_count".

    Task and form of the responses are those of verl's recipe of that name: each letter of the word
    is compared with the one asked for, which occurs 1 to all times, each number being as likely;
    `\boxed{}` then holds the number. One word in ten is held out. The seed is ignored.
    """
    del seed
    rng = np.random.default_rng([_COUNT_STREAM, split == "heldout"])
    examples: list[Example] = []
    while len(examples) < count:
        length = rng.integers(5, 21)
        answer = rng.integers(1, length + 1)
        asked, *others = rng.permutation(list(string.ascii_lowercase))
        letters = rng.permutation([asked] * answer + list(rng.choice(others, length - answer)))
        word = "-".join(letters)
        if (zlib.crc32(word.encode()) % 10 == 0) != (split == "heldout"):
            continue
        lines = [f"{x} {'=' if x == asked else '!='} {asked}.\n" for x in letters]
        lines.append(f"\\boxed{{{answer}}} {asked} in {word}.")
        prompt = ({"role": "user", "content": f"How many {asked} are there in word {word}?"},)
        examples.append(Example(prompt, "char_count", str(answer), response="".join(lines)))
    return examples
