import json
import time

import pytest

from jax_ppo.rewards import number_rules
from jax_ppo.rewards.number_rules import extract_gsm8k, score_gsm8k
from real_data import DATA, needs

# text, result of strict, result of flexible
ANSWERS = [
    ("2 + 2 = 4\n#### 4", "4", "4"),
    ("#### 1,234", "1234", "1234"),
    ("#### -3", "-3", "-3"),
    ("#### 3\nno, wait\n#### 5", "5", "5"),
    ("The answer is 42", None, "42"),
    ("no number at all", None, None),
    ("", None, None),
    ("#### seven", None, None),
    ("#### ,", None, None),
    ("it costs $1,234.50 in all.", None, "1234.50"),
    ("-$3", None, "-3"),
    ("he has 10-3 left", None, "3"),
    ("3 and (2)-1", None, "1"),
    ("it is .5", None, ".5"),
    ("1, 2", None, "2"),
    ("1,23", None, "23"),
    ("It is 72, in total, as shown.", None, "72"),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), ANSWERS)
def test_what_is_extracted(text, strict, flexible):
    assert extract_gsm8k(text, "strict") == strict
    assert extract_gsm8k(text, "flexible") == flexible


@pytest.mark.parametrize(
    "text", ["#### 42.", "#### 42.00", "#### $42", "####42", "#### **42**", "42 pens.", "=> 42"]
)
def test_flexible_takes_answers_however_they_are_written(text):
    """Regression: verl's pattern matches none of these (verl#7789).

    Its flexible method could not be selected.
    """
    result = score_gsm8k(text, "42", "flexible")
    assert result == number_rules.RewardResult(1.0, True, {"answered": 1.0}, answer="42")


@pytest.mark.parametrize("answer", ["7", "7.0", "7.", "07", "7.00"])
def test_equal_numbers_are_one_answer(answer):
    assert score_gsm8k(f"#### {answer}", "42").answer == "7"
    assert score_gsm8k("#### 1.2.3", "42").answer == "1.2.3"  # no number
    assert score_gsm8k("seven", "42").answer is None
    assert score_gsm8k("#### 40", "42").answer == "40"


@pytest.mark.parametrize("text", ["#### $42", "####42", "#### **42**", "the answer is 42"])
def test_strict_wants_the_form(text):
    assert score_gsm8k(text, "42", "strict") == number_rules.RewardResult(
        0.0, False, {"answered": 0.0}
    )


@pytest.mark.parametrize("method", number_rules.GSM8K_METHODS)
@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        ("42", "42.00", True),
        ("42.00", "42", True),
        ("42.", "42", True),
        ("1,000", "1000", True),
        ("1000", "1,000", True),
        ("-0", "0", True),
        ("0.30", "0.3", True),
        ("42.01", "42", False),
        ("4", "42", False),
        ("-42", "42", False),
    ],
)
def test_numbers_are_compared_as_numbers(method, answer, truth, correct):
    result = score_gsm8k(f"so\n#### {answer}", truth, method)
    assert (result.score, result.correct) == (float(correct), correct)


def test_what_looks_like_a_number_and_is_none():
    assert score_gsm8k("#### 1.2.3", "1.23").correct is False
    assert score_gsm8k("#### ...", "0").correct is False
    assert score_gsm8k("#### 5", "").correct is False, "nothing to compare with is not right"


def test_only_the_end_of_a_response_is_looked_at():
    assert score_gsm8k("#### 42" + " " * 294, "42").correct is False
    assert score_gsm8k("#### 42" + " " * 293, "42").correct is True


@pytest.mark.parametrize("method", number_rules.GSM8K_METHODS)
@pytest.mark.parametrize(
    "text", ["1," * 200_000, "#" * 99_999, "1" * 99_999, "#### " + "1,111" * 100_000, "$-" * 9999]
)
def test_long_junk_takes_no_time(method, text):
    start = time.thread_time()  # the processor's: other programs may run meanwhile
    score_gsm8k(text, "1", method)
    assert time.thread_time() - start < 0.5


def test_a_minus_sign_is_one():
    assert score_gsm8k("so\n#### \u22123", "-3").correct
    assert not score_gsm8k("so\n#### \u22123", "3").correct


@pytest.mark.parametrize(
    "text", ["#### __import__('os')", "#### 40+2", "#### 6*7", "#### 4_2", "#### ４２"]
)
def test_nothing_that_a_model_wrote_is_evaluated(text):
    """Regression: CVE-2026-6878, a grader called eval on the model's output."""
    assert score_gsm8k(text, "42").correct is False


@needs("gsm8k")
@pytest.mark.parametrize("method", number_rules.GSM8K_METHODS)
@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_every_gold_answer_of_gsm8k_scores_one(method, name, count):
    lines = (DATA / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    truths = [answer.rpartition("#### ")[2] for answer in answers]
    scores = [
        score_gsm8k(answer, truth, method).score
        for answer, truth in zip(answers, truths, strict=True)
    ]
    assert len(scores) == sum(scores) == count
    shifted = [
        score_gsm8k(answer, str(int(truth.replace(",", "")) + 1), method).score
        for answer, truth in zip(answers, truths, strict=True)
    ]
    assert sum(shifted) == 0


def test_arithmetic_is_strict():
    assert number_rules.score_arithmetic("3 + 4 = 7\n7 - 2 = 5\n#### 5", "5").score == 1
    assert number_rules.score_arithmetic("5", "5").score == 0
    assert number_rules.score_arithmetic("#### 5+5", "5").score == 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("It was dark.", 0.0),
        ("Lily was happy.", 0.2),
        ("happy happy Happy, HAPPY!", 0.2),
        ("unhappy playful", 0.0),
        ("They played and laughed. It was fun, and Lily was happy.", 0.8),
        ("Happy friends love to play, hug, dance, sing and laugh: such fun.", 1.0),
    ],
)
def test_stories_by_hand(text, score):
    result = number_rules.score_story(text)
    assert result.score == pytest.approx(score)
    assert result.correct is None
    assert result.extra["joyful_words"] >= round(score * 5)


def test_the_joyful_words():
    assert len(number_rules.JOYFUL_WORDS) == 25
    assert all(word.isalpha() and word.islower() for word in number_rules.JOYFUL_WORDS)
