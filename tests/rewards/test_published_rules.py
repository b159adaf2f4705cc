"""Rules of data sources: each as its publisher scores, on what its own instruction asks for."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ppo.config.schema import Reward
from jax_ppo.rewards import reward_functions
from jax_ppo.rewards.math_rules import score_dapo
from jax_ppo.rewards.row_rules import find_obstacles
from jax_ppo.rewards.rule_table import RULES, rule_of_source
from jax_ppo.rewards.samples import RewardRow
from jax_ppo.rewards.text_rules import score_search_answer
from jax_ppo.types import Example
from verl_rules import load_verl_rule

# data_source, ground truth, a right response and a wrong one in the publisher's form, their scores
PUBLISHED = [
    ("openai/gsm8k", "5", "so\n#### 5", "so\n#### 6", (1, 0)),
    ("lighteval/MATH", "5", r"so \boxed{5}", r"so \boxed{6}", (1, 0)),
    ("DigitalLearningGmbH/MATH-lighteval", "5", r"\boxed{5}", "Answer: 5", (1, 0)),
    ("HuggingFaceH4/MATH-500", "5", r"\boxed{5}", "Answer: 5", (1, 0)),
    ("numina_cn_k12", "5", r"\boxed{5}", r"\boxed{6}", (1, 0)),
    ("math_dapo", "5", "so\nAnswer: 5", "so it is 5", (1, -1)),
    ("math_dapo", "34", "Answer: $34$", "Answer: 43", (1, -1)),
    ("math", "5", r"Answer: \boxed{5}", "5", (1, -1)),
    ("math_dapo_reasoning", "5", "Answer: 5", "Answer:", (1, -1)),
    ("aime_2024", "204", "so\nAnswer: 204", "Answer: 204\nAnswer: 5", (1, -1)),
    ("aime2025", "204", "<think>Answer: 5</think>Answer: x = 204.", "Answer: 20", (1, -1)),
    ("char_count", "5", r"a = a.\n\boxed{5} a in a-b.", r"\boxed{5.0}", (1, 0)),
    ("searchR1_nq", {"target": ["The Who", "who"]}, "<answer>who!</answer>", "who", (1, 0)),
]


@pytest.mark.parametrize(("source", "truth", "right", "wrong", "scores"), PUBLISHED)
def test_a_source_is_scored_by_its_publishers_rule_and_range(source, truth, right, wrong, scores):
    if RULES[rule_of_source(source)].module:
        pytest.importorskip(RULES[rule_of_source(source)].module)
    function = reward_functions.resolve_reward_function(Reward())
    row = RewardRow(source, truth)
    results = [function(row, response) for response in (right, wrong)]
    assert tuple(result.score for result in results) == scores
    assert [result.correct for result in results] == [True, False]
    assert not list(find_obstacles([Example("q", source, truth)]))


# How the right answer is written: (ours, verl's) correctness.
DAPO_FORMS = {
    "Answer: {n}": (True, True),
    "so {other}\nAnswer: ${n}$": (True, True),
    "answer : {n}": (True, True),
    r"Answer: \boxed{{{n}}}": (True, True),
    r"Answer: \text{{{n}}}": (True, True),
    "Answer: x={n}": (True, True),
    "Answer: {n:,}": (True, True),
    "Answer: {n} cm": (True, True),
    r"Answer: {n}^\circ": (True, True),
    "Answer: {other}\nAnswer: {n}": (True, True),
    "Answer: {n}\nAnswer: {other}": (False, False),
    "Answer: {other}": (False, False),
    "Answer: -{n}": (False, False),
    "Answer: {n}/997": (False, False),
    "Answer: {n} or {other}": (False, False),
    r"\boxed{{{n}}}": (True, True),
    r"\boxed{{{n}}} Answer: {other}": (False, False),
    "The answer is {n}": (False, False),
    "{n}": (False, False),
    "Answer: {n}{filler}": (False, False),
    "{filler}\nAnswer: {n}": (True, True),
    # Right answers that verl compares as text.
    "Answer: {n}.": (True, False),
    "Answer: {n}.0": (True, False),
    "**Answer: {n}**": (True, False),
    "<think>{other}</think><answer>{n}</answer>": (True, False),
}


@pytest.mark.parametrize("form", DAPO_FORMS)
def test_daposs_rule_differs_from_verls_only_as_listed(form):
    verl = load_verl_rule("math_dapo")
    for n in (3, 42, 999, 1234, 20250):
        text = form.format(n=n, other=n + 5, filler=" word" * 80)
        ours = score_dapo(text, str(n))
        assert ours.score == (1 if ours.correct else -1)
        expected, theirs = DAPO_FORMS[form]
        assert ours.correct is expected
        if verl is not None:
            result = verl.compute_score(text, str(n))
            assert (result["acc"], result["score"]) == (theirs, 1.0 if theirs else -1.0)


@pytest.mark.parametrize(
    ("answer", "truth", "correct", "by_verl"),
    [
        (r"\frac{1}{2}", r"\frac12", True, True),
        (r"\sqrt{2}", r"\sqrt2", True, True),
        ("(1, 2)", "(1,2)", True, True),
        ("x = 7", "7", True, True),
        (r"5\text{ cm}", "5", True, True),
        (r"\frac{1}{2}", "1/2", True, False),
        (r"\dfrac{1}{2}", "0.5", True, False),
        (r"\(5\)", "5", True, False),
        ("`5`", "5", True, False),
        (r"\frac{1}{2}", r"\frac{2}{1}", False, False),
        (r"\sqrt{2}", "2", False, False),
    ],
)
def test_answers_in_latex_are_compared_as_verl_does_or_better(answer, truth, correct, by_verl):
    assert score_dapo(f"Answer: {answer}", truth).correct is correct
    verl = load_verl_rule("math_dapo")
    if verl is not None:
        assert verl.compute_score(f"Answer: {answer}", truth)["acc"] is by_verl


@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        # A mixed number is no product, and a fraction ends where its braces do.
        (r"2\frac{1}{2}", "5/2", True),
        (r"2\frac{1}{2}", "21/2", False),
        (r"\frac{x+1}{2}", r"x+\frac{1}{2}", False),
        (r"\frac{a}{b+c}", r"\frac{a}{b}+c", False),
        (r"\frac{a}{bc}", r"\frac{a}{b}c", False),
        (r"\frac{11}{2}", r"\frac112", False),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{\sqrt2}{2}", True),
        (r"\frac{3.5}{2}", "1.75", True),
        (r"\frac{1,000}{4}", "250", True),
        # Letters behind a number are factors, if they are no unit.
        ("2a", "2b", False),
        ("2", "2a", False),
        ("2xy", "2", False),
        ("2 pi", "2", False),
        ("2π", r"2\pi", True),
        ("2cm", "2", True),
        ("2 inches", "2", True),
        ("2 cm", "2", True),
        ("4 r", "4r", True),
        ("4 r", "4", False),
        ("2 ab", "2 cd", False),
        ("1.5 × 10^3", "1500", True),
        ("1e3", "1000", True),
        (r"5 \\", "5", True),
        ("5", "5\\ ", True),
        # All of several values count.
        ("x=5, y=2", "x=1, y=2", False),
        ("x=5 and y=2", "x=1 and y=2", False),
        ("x = 3 + 2 = 5", "5", True),
        ("factor = 3 + 2 = 5", "5", True),
        (r"x=5\lor x=6", r"x=4\lor x=6", False),
        ("f(1, 2) = 5", "5", True),
        # Characters that stand for LaTeX.
        ("\u22123", "-3", True),
        ("½", r"\frac{1}{2}", True),
        ("√2", r"\sqrt{2}", True),
        ("x²", "x^2", True),
        ("x⁻¹", "x^{-1}", True),
        ("1.5×10⁻³", "0.0015", True),
        ("2^{10}", "2^10", True),
        ("x^{2y}", "x^2y", False),
        ("５", "5", True),
        ("30°C", "30", True),
        (r"30^\circ", "30°", True),
        ("5", '["5", "6"]', True),
        ("6", '["5", "6"]', True),
        ("7", '["5", "6"]', False),
    ],
)
def test_answers_that_differ_are_not_made_equal(answer, truth, correct):
    assert score_dapo(f"Answer: {answer}", truth).correct is correct
    assert not list(find_obstacles([Example("q", "math_dapo", truth)]))


@pytest.mark.parametrize(
    "form", ["**Answer**: 5", "__Answer__ : 5", "Answer：5", "**Answer:**\n\\[\n5\n\\]"]
)
def test_a_marked_or_wide_colon_is_one(form):
    assert score_dapo(form, "5").correct


@pytest.mark.parametrize(
    "truth", ["proof", "notfound", "We see that the sum of both terms is even for all odd n"]
)
def test_what_no_box_can_hold_is_refused(truth):
    """Regression: each right answer to it scored as wrong."""
    (obstacle,) = find_obstacles([Example("q", "HuggingFaceH4/MATH-500", truth)])
    assert "cannot be the answer in a box" in obstacle
    fine = r"x = 5 \text{ if } a > 0 \text{ or else } \frac{1}{2}"
    assert not list(find_obstacles([Example("q", "HuggingFaceH4/MATH-500", fine)]))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>The Beatles.</answer>", 1),
        ("<answer>beatles</answer>", 1),
        ("<answer>Stones</answer><answer>a Beatles</answer>", 1),
        ("<answer>Beatles and Stones</answer>", 0),
        ("Beatles", 0),
        ("<answer>Beatles</answer>" * 11, 0.25),
    ],
)
def test_search_answers_are_scored_as_by_verl(response, score):
    truth = {"target": ["the Beatles", "Fab Four"]}
    assert score_search_answer(response, truth).score == score
    verl = load_verl_rule("search_r1_like_qa_em")
    if verl is not None:
        assert verl.compute_score(response, truth) == score
    as_text = json.dumps(truth["target"])
    assert score_search_answer(response, as_text).score == score


def test_prefixes_of_sources():
    assert rule_of_source("aime") == rule_of_source("aime_2031") == "math_dapo"
    assert rule_of_source("HuggingFaceH4/aime_2024") == "math"
    assert rule_of_source("aim") is rule_of_source("") is rule_of_source("*") is None


TRUTHS = st.one_of(
    st.text(max_size=40),
    st.text("0123456789.,/:-+ e$%kmABCab\\{}()=\n", max_size=12),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from(["B", "(c)", r"\frac{1}{2}", r"\boxed{7}", "x = 5", "3/4", "12:30", "5 km"]),
).map(lambda value: value if isinstance(value, str) else str(value))


@given(st.sampled_from([name for name, rule in RULES.items() if rule.perfect]), TRUTHS, TRUTHS)
@settings(max_examples=1500, deadline=None)
def test_a_perfect_answer_to_an_accepted_ground_truth_is_right(name, truth, other):
    """Also in <answer> tags after thinking about another answer, and as one of two alternatives."""
    rule = RULES[name]
    if next(find_obstacles([Example("q", "any", truth)], Reward(terms=f"{name}:1")), None):
        return
    function = rule.bind("")
    perfect = rule.perfect(truth)
    assert function(RewardRow("any", truth), perfect).correct
    assert function(RewardRow("any", [truth, "7"]), perfect).correct
    if name != "arithmetic" and "<" not in perfect:
        for form in ("<think>{1}</think><answer>{0}</answer>", "{1}</think>\n{0}"):
            response = form.format(perfect, "I see. Answer: 77 (A) #### 77")
            assert function(RewardRow("any", truth), response).correct, response


@pytest.mark.parametrize("truth", [["2", "two"], [2, "two"]])
def test_each_of_several_ground_truths_is_right(truth):
    for rule, wrong in (("exact", "three"), ("math_dapo", "Answer: three")):
        function = reward_functions.resolve_reward_function(Reward(terms=f"{rule}:1"))
        prefix = "Answer: " if rule == "math_dapo" else ""
        row = RewardRow("any", json.loads(json.dumps(truth)))
        assert all(function(row, f"{prefix}{answer}").correct for answer in ("2", "two"))
        assert function(row, wrong).correct is False


def test_a_ground_truth_that_is_a_list_as_text_is_read_or_refused():
    """Regression: `exact` compared responses with the text of the list."""
    exact = RULES["exact"].bind("")
    for truth in ('["a", "b"]', ' [ "a","b" ]'):
        row = RewardRow("any", truth)
        assert all(exact(row, response).correct for response in ("a", "b", truth))
        assert not exact(row, '"a"').correct and not exact(row, "c").correct
    # What Python prints may be what a program's output is.
    assert exact(RewardRow("any", "['a']"), "['a']").correct
    for name, truth, words in (
        ("exact", '["a", ""]', "has an empty entry"),
        ("math", "['a', 'b']", "as Python prints it"),
        ("math", "['x', \"f'(x)\"]", "as Python prints it"),
        ("math", "[\"f'(x)\", 'x']", "as Python prints it"),
        ("math_dapo", "['18' '19']", "as Python prints it"),
        ("search_qa", "['a']", "is not text, a list"),
    ):
        assert words in RULES[name].find_obstacle(truth), (name, truth)
    for name, truth in (("regex", '["]'), ("math_dapo", "[0, 1]"), ("exact", "[" * 100_000)):
        assert not RULES[name].find_obstacle(truth), name


@pytest.mark.parametrize(
    "junk",
    [
        r"\boxed{",
        r"\boxed",
        "{",
        "<answer>",
        "</answer>",
        "<think>",
        "(A) ",
        "Answer:",
        "answer is (",
        "* ",
    ],
)
def test_long_junk_takes_no_time(junk):
    """Without it, a response could keep the run's own process busy."""
    response = junk * (400_000 // len(junk))
    start = time.thread_time()
    for name in ("gsm8k", "math", "math_dapo", "boxed", "multiple_choice", "exact", "search_qa"):
        RULES[name].bind("")(RewardRow("any", "B"), response)
    assert time.thread_time() - start < 2
