import re

import numpy as np
import pytest

from jax_ppo.demonstration import arithmetic, stories
from jax_ppo.environments.calculator import calculate
from worked_solutions import generate_worked_solutions


def find_numbers(prompt):
    return tuple(int(n) for n in re.findall(r"\d", prompt))


def test_a_problem_depends_on_its_index_alone():
    assert arithmetic.generate_problem(5, "train") == arithmetic.generate_problem(5, "train")
    assert (
        arithmetic.generate_arithmetic_examples(6, seed=1)[5]
        == arithmetic.generate_arithmetic_examples(8)[5]
    )
    assert arithmetic.generate_problem(5, "train") != arithmetic.generate_problem(5, "heldout")


def test_one_thing_is_singular():
    noun_after = re.compile(r"\w+ has (\d+) (\w+)\. .* How many (\w+) does")
    firsts = set()
    for index in range(300):
        first, noun, plural = noun_after.search(
            arithmetic.generate_problem(index, "train").question
        ).groups()
        firsts.add(first)
        assert (noun == plural) == (first != "1") and plural.endswith("s")
    assert "1" in firsts


def test_training_and_held_out_problems_share_no_numbers():
    train = {find_numbers(e.prompt) for e in arithmetic.generate_arithmetic_examples(5000)}
    held_out = {
        find_numbers(e.prompt) for e in arithmetic.generate_arithmetic_examples(2000, "heldout")
    }
    assert len(held_out) > 50
    assert len(train) > 300
    assert not train & held_out


def test_the_numbers_stay_small_and_never_negative():
    for split in arithmetic.SPLITS:
        for index in range(2000):
            p = arithmetic.generate_problem(index, split)
            assert all(1 <= n <= 9 for n in p.numbers)
            assert 0 <= p.intermediate <= 9
            assert 0 <= p.answer <= 9


def test_a_problem_by_hand():
    p = arithmetic.Problem((3, 4, 2), "+-", "Tom has 3 apples.")
    assert p.worked_solution == "3+4=7\n7-2=5\n#### 5"
    assert p.prompt == "Question: Tom has 3 apples.\nAnswer:\n"
    assert arithmetic.Problem((7, 5, 9), "-+", "").worked_solution == "7-5=2\n2+9=11\n#### 11"


def test_every_careful_solution_is_right():
    for example in arithmetic.generate_arithmetic_examples(1000):
        first, second, final = example.extra_info["solution"].split("\n")
        for step in (first, second):
            left, sign, right, _, result = step  # each a single character
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result)
        assert second[0] == first[-1]
        assert final == f"#### {example.ground_truth}" == f"#### {second[-1]}"


def test_worked_examples_have_the_shares_they_promise():
    """Regression: with seed 0 problems with a small first number were solved carefully."""
    pairs = generate_worked_solutions(4000, 0.25, seed=0)
    answers = {e.prompt: e.ground_truth for e in arithmetic.generate_arithmetic_examples(4000)}
    hasty = [(p, r) for p, r in pairs if "=" not in r]
    assert all(r.endswith(f"#### {answers[p]}") for p, r in pairs if "=" in r)
    share = sum(r == f"#### {answers[p]}" for p, r in hasty) / len(hasty)
    assert share == pytest.approx(0.15, abs=0.03)
    assert all(0 <= int(r[5:]) and abs(int(r[5:]) - int(answers[p])) <= 3 for p, r in hasty)
    assert pairs != generate_worked_solutions(4000, 0.25, seed=1)
    for kind in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
        careful = ["=" in response for prompt, response in pairs if find_numbers(prompt)[0] in kind]
        assert sum(careful) / len(careful) == pytest.approx(0.25, abs=0.05)


def test_story_openings_are_disjoint_by_name():
    train, held_out = set(stories.story_names("train")), set(stories.story_names("heldout"))
    assert not train & held_out
    assert len(train | held_out) == len(stories.GIRLS) + len(stories.BOYS)
    for split, names in (("train", train), ("heldout", held_out)):
        for example in stories.generate_story_examples(200, split):
            assert example.response[0] + example.response[-1] == " ."
            assert example.rejected != example.response
            assert (
                len((train | held_out) & set(re.findall(r"[A-Z]\w+", example.prompt)) & names) == 1
            )


def test_story_openings_follow_from_the_seed():
    assert (
        stories.generate_story_examples(20, seed=1)
        == stories.generate_story_examples(20, seed=1)
        != stories.generate_story_examples(20, seed=2)
    )
    assert (
        stories.generate_story_examples(5, seed=1)
        == stories.generate_story_examples(20, seed=1)[:5]
    )
    assert {(e.data_source, e.ground_truth) for e in stories.generate_story_examples(5)} == {
        ("stories", "")
    }


def test_sums_are_asked_right_in_chats_and_held_out_ones_are_not_trained():
    train, heldout = (
        arithmetic.generate_sum_examples(3000, split) for split in ("train", "heldout")
    )
    asked = [{e.prompt[0]["content"] for e in split} for split in (train, heldout)]
    assert asked[0].isdisjoint(asked[1]) and min(map(len, asked)) > 300
    for example in (*train[:50], *heldout[:50]):
        a, b = map(int, re.findall(r"\d+", example.prompt[0]["content"]))
        assert int(example.ground_truth) == a + b and 10 <= min(a, b) <= max(a, b) < 100
    assert arithmetic.generate_sum_examples(5) == train[:5]


def test_calculations_are_solved_by_the_calculator_and_held_out_ones_are_not_trained():
    train, heldout = (
        arithmetic.generate_calculation_examples(500, split) for split in ("train", "heldout")
    )
    asked = [
        {tuple(re.findall(r"\d+", e.prompt[0]["content"])[:2]) for e in split}
        for split in (train, heldout)
    ]
    assert asked[0].isdisjoint(asked[1])
    for example in (*train[:50], *heldout[:50]):
        question = example.prompt[0]["content"]
        a, b, sign, c = re.fullmatch(
            r"What is (\d{3}) times (\d\d) (plus|minus) (\d{3})\?", question
        ).groups()
        value = int(a) * int(b) + {"plus": 1, "minus": -1}[sign] * int(c)
        call, observed, answer = re.split(r"(?<==)|(?=\.)", example.response, maxsplit=2)
        assert calculate(call) == observed == example.ground_truth == str(value)
        assert answer == f". The answer is {value}."
    assert arithmetic.generate_calculation_examples(5) == train[:5]


def test_letters_are_counted_one_by_one_and_held_out_words_are_not_trained():
    train, heldout = (
        arithmetic.generate_count_examples(1500, split) for split in ("train", "heldout")
    )
    words = [
        {e.prompt[0]["content"].split()[-1] for e in examples} for examples in (train, heldout)
    ]
    assert words[0].isdisjoint(words[1]) and len(words[0]) > 1200
    for example in train:
        asked, word = re.fullmatch(
            r"How many ([a-z]) are there in word ([a-z](?:-[a-z]){4,19})\?",
            example.prompt[0]["content"],
        ).groups()
        letters = word.split("-")
        *lines, conclusion = example.response.split("\n")
        assert lines == [f"{x} {'!='[x == asked :]} {asked}." for x in letters]
        assert conclusion == f"\\boxed{{{letters.count(asked)}}} {asked} in {word}."
        assert example.ground_truth == str(letters.count(asked)) != "0"
    # Lengths of 5 to 20 and numbers from 1 to the length are equally likely: (12.5 + 1) / 2.
    assert np.mean([int(e.ground_truth) for e in train]) == pytest.approx(6.75, abs=0.5)
    assert arithmetic.generate_count_examples(5) == train[:5]
