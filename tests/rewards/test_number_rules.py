import json
import random
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ppo.data.row_formats import parse_row
from jax_ppo.errors import UserError
from jax_ppo.rewards import number_rules
from jax_ppo.rewards.number_rules import (
    CLIP,
    Quantity,
    extract_gsm8k,
    format_quantity,
    last_number,
    parse_number,
    score_gsm8k,
)
from jax_ppo.rewards.row_rules import validate_data_sources
from real_data import DATA, needs
from verl_rules import load_verl_rule

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
    ("$18{,}000$ or $18,\\!500$", None, "18500"),
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
    # verl's pattern of 2024, which its published logs were scored by.
    first = re.search(r"#### (\-?[0-9\.\,]+)", text)
    assert extract_gsm8k(text, "first") == (first and first[1].replace(",", "") or None)
    assert extract_gsm8k(f"#### 7 {CLIP * ' so'}{text}", "first") == "7"


@pytest.mark.parametrize("answer", ["7", "7.0", "7.", "07", "7.00"])
def test_equal_numbers_are_one_answer(answer):
    assert score_gsm8k(f"#### {answer}", "42").answer == "7"
    assert score_gsm8k("#### 1.2.3", "42").answer == "1.2.3"  # no number
    assert score_gsm8k("seven", "42").answer is None
    assert score_gsm8k("#### 40", "42").answer == "40"


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


@pytest.mark.parametrize(
    "text", ["#### __import__('os')", "#### 40+2", "#### 6*7", "#### 4_2", "#### ４２"]
)
def test_nothing_that_a_model_wrote_is_evaluated(text):
    """Regression: CVE-2026-6878, a grader called eval on the model's output."""
    assert score_gsm8k(text, "42").correct is False


# How the right answer is written: (ours strict, verl's strict, ours flexible, verl's flexible) give
# a reward. docs/data-and-rewards.md lists the differences.
FORMS = {
    "#### {n}": (1, 1, 1, 1),
    "so {n}\n#### {n}\n": (1, 1, 1, 1),
    "#### {other}\n#### {n}": (1, 1, 1, 1),
    "#### {n}\n#### {other}": (0, 0, 0, 0),
    "#### {n:,}": (1, 1, 1, 0),
    "#### {n}.": (1, 0, 1, 0),
    "#### {n}.0": (1, 0, 1, 0),
    "#### {n}.00": (1, 0, 1, 0),
    "#### 0{n}": (1, 0, 1, 0),
    "#### ${n}": (0, 0, 1, 1),
    "#### **{n}**": (0, 0, 1, 1),
    "####{n}": (0, 0, 1, 1),
    "#### {n} pens": (1, 1, 1, 1),
    "#### {n} pens, {other} in all": (1, 1, 0, 0),
    "The answer is {n}": (0, 0, 1, 1),
    "The answer is {n}.": (0, 0, 1, 0),
    "It is {n}, as shown": (0, 0, 1, 0),
    "{n} {other}": (0, 0, 0, 0),
    "#### {other}": (0, 0, 0, 0),
    "{other}-{n}": (0, 0, 1, 0),
    "#### -{n}": (0, 0, 0, 0),
    "#### {n}/997": (0, 1, 0, 0),
    "#### {n}e3": (0, 1, 0, 0),
    "#### {n}+991": (0, 1, 0, 0),
    "<answer>{n}</answer>": (1, 0, 1, 1),
    "#### {n}</think>": (0, 1, 0, 1),
    "<think>#### {other}</think>#### {n}": (1, 1, 1, 1),
    "no number": (0, 0, 0, 0),
    "{n}{filler}": (0, 0, 0, 0),
    "{filler}\n#### {n}": (1, 1, 1, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_rewards_differ_from_verls_only_as_listed(form):
    """Regression: verl's pattern misses most forms (verl#7789), and "flexible" was unreachable."""
    verl = load_verl_rule("gsm8k")
    generator = random.Random(form)
    for _ in range(200):
        n = generator.randrange(1000, 10**7)
        if ":," not in form and generator.random() < 0.5:
            n = generator.randrange(1, 100)
        text = form.format(n=n, other=n + generator.randrange(1, 999), filler=" word" * 80)
        for place, method in enumerate(("strict", "flexible")):
            ours, theirs = FORMS[form][2 * place : 2 * place + 2]
            assert score_gsm8k(text, str(n), method).score == ours
            if verl is not None:
                assert verl.compute_score(text, str(n), method) == theirs


def read_answers(name):
    lines = (DATA / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


@needs("gsm8k")
@pytest.mark.parametrize("method", number_rules.GSM8K_METHODS)
@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_every_gold_answer_of_gsm8k_scores_one(method, name, count):
    answers = read_answers(name)
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


UNITS = ("", " km", "%", " square feet", " miles per hour", " m^2", "°C", " €", " apples.")


def group(digits, separator):
    """Return digits in groups of three."""
    return f"{int(digits):,}".replace(",", separator)


@st.composite
def notations(draw):
    """Draw (value, two notations of it)."""
    whole = draw(st.integers(0, 10**9))
    kind = draw(st.sampled_from(("integer", "decimal", "fraction", "mixed", "time")))
    if kind == "integer":
        texts = [str(whole), f"0{whole}", f"{whole}.00", f"{whole}/1", f"{2 * whole}/2"]
        texts += [group(str(whole), mark) for mark in (",", " ", "'", "\u202f")]
        texts += [f"{10 * whole}e-1", f"{whole}E+0", f"{whole * 100} x 10^-2", f"${whole}"]
        value = Fraction(whole)
    elif kind == "decimal":
        places = draw(st.integers(1, 6))
        value = Fraction(whole, 10**places)
        text = f"{whole // 10**places}.{whole % 10**places:0{places}}"
        texts = [
            text,
            f"{text}0",
            f"{whole}e-{places}",
            f"{whole}/{10**places}",
            f"{whole}e-{places}",
        ]
        texts += [f"{whole}×10^{{-{places}}}", f"{whole} * 10**-{places}"]
    elif kind == "fraction":
        divisor = draw(st.integers(1, 10**6))
        value = Fraction(whole, divisor)
        texts = [f"{whole}/{divisor}", f"{whole} / {divisor}", f"{3 * whole}/{3 * divisor}"]
        texts += [f"{whole}.0/{divisor}", f"{whole:,}/{divisor:,}"]
    elif kind == "mixed":
        below = draw(st.integers(2, 999))
        above = draw(st.integers(1, min(99, below - 1)))
        whole %= 100
        value = whole + Fraction(above, below)
        texts = [f"{whole} {above}/{below}", f"{whole * below + above}/{below}"]
    else:
        hour, minute = whole % 24, whole % 60
        half = "ap"[hour >= 12]
        texts = [f"{hour}:{minute:02}", f"{hour:02}:{minute:02}:00"]
        texts += [f"{(hour - 1) % 12 + 1}:{minute:02}{end}" for end in (f"{half}m", f" {half}.m.")]
        pair = draw(st.tuples(st.sampled_from(texts), st.sampled_from(texts)))
        return Quantity(hour + Fraction(minute, 60), is_time=True), *pair
    if draw(st.booleans()) and kind != "time":
        value = -value
        texts = [text.replace("$", "-$") if "$" in text else f"-{text}" for text in texts]
        texts += [text.replace("-", "\u2212", 1) for text in texts]
    unit = draw(st.sampled_from(UNITS))
    return Quantity(value), draw(st.sampled_from(texts)) + unit, draw(st.sampled_from(texts))


@given(notations())
@settings(max_examples=600, deadline=None)
def test_all_notations_of_a_number_are_equal(drawn):
    value, one, other = drawn
    assert parse_number(one) == parse_number(other) == value
    # Whatever the data say, its one text is a right answer, and a right answer stays one.
    assert parse_number(format_quantity(value)) == value
    for method in number_rules.GSM8K_METHODS:
        assert score_gsm8k(f"so\n#### {format_quantity(value)}", one, method).correct
    assert score_gsm8k(f"so\n#### {other}", one, "flexible").correct
    assert score_gsm8k(f"so it is {format_quantity(value)}.", one, "flexible").correct


@given(notations(), notations())
@settings(max_examples=300, deadline=None)
def test_different_numbers_differ(first, second):
    same = first[0] == second[0]
    assert (parse_number(first[1]) == parse_number(second[1])) is same
    assert score_gsm8k(f"#### {format_quantity(first[0])}", second[1]).correct is same


@pytest.mark.parametrize(
    "text",
    (
        "1,5 1,23 1.2.3 12:75 13:00pm 2:3:4 3:2 0x1F 4_2 1/0 1/2/3 40+2 6*7 3-4 1e999 3x ４２ ½ 5k "
        "9pm -1:30 NaN inf #### $ - 2024-01-02"
    ).split()
    + ["3 to 4", "40 + 2", "1.5 million", "3 dozen", "3 and a half", "4\nor 5", "five", "", "1 00"]
    + [
        "5 hundredths",
        "2 pi",
        "2π",
        "3 lakh",
        "4 and so on",
        "1 0000",
        "2 cups of white flour",
        "9" * 61,
    ],
)
def test_what_is_not_read_whole_is_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value", "written"),
    [
        ("-$1,234.50", Fraction(-2469, 2), "-1234.5"),
        ("3/4", Fraction(3, 4), "0.75"),
        ("1.5e3", Fraction(1500), "1500"),
        ("1 000", Fraction(1000), "1000"),
        ("12,34,567 rupees", Fraction(1234567), "1234567"),
        ("1 1/3", Fraction(4, 3), "4/3"),
        (".5%", Fraction(1, 2), "0.5"),
        ("-0", Fraction(0), "0"),
    ],
)
def test_numbers_by_hand(text, value, written):
    assert parse_number(text) == Quantity(value)
    assert format_quantity(Quantity(value)) == written


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("half of 3/4 is 3/8", "3/8"),
        ("12/3=4", "4"),
        ("from 12:30 to 1:15 pm", "1:15 pm"),
        ("2 x 10^3 metres", "2x10^3"),
        ("a total of 1 000 000", "1000000"),
        ("3:2", "2"),
    ],
)
def test_the_last_number_is_found_whole(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("3/4", "0.75", "3"),
        ("1.5e3", "1500", "1.5"),
        ("12:30", "12:30", "12"),
        ("1 000", "1000", "1"),
        ("1,080", "1080", "1"),
        ("$18.", "18", "1"),
        ("5 km", "5", "6"),
    ],
)
def test_the_answer_of_a_gsm8k_row_is_read_whole(gold, right, wrong):
    example = parse_row({"question": "q", "answer": f"First #### 7.\n#### {gold}"}, "a:1")
    validate_data_sources([example])
    assert score_gsm8k(f"#### {right}", example.ground_truth).correct
    assert not score_gsm8k(f"#### {wrong}", example.ground_truth).correct


def test_an_answer_that_is_not_a_number_is_refused_by_its_row():
    rows = [{"question": "q", "answer": f"so\n#### {gold}"} for gold in ("4", "4 or 5")]
    examples = [parse_row(row, f"a:{number}") for number, row in enumerate(rows, 1)]
    with pytest.raises(UserError, match="^a:2: ground_truth='4 or 5' is not a number"):
        validate_data_sources(examples)
