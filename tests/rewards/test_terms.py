"""Rewards that add up terms, and the built-in rules that terms name."""

import importlib.util
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ppo.config.parsing import Term, parse_terms
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards import math_rules, reward_functions, row_rules, text_rules
from jax_ppo.rewards.samples import RewardRow
from jax_ppo.thoughts import MARKS
from jax_ppo.types import Example

GOOD = "<think>6*7</think>\n<answer>42</answer>"
FUNCTION = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "shouts": solution_str.isupper()}
"""


def resolve(terms):
    return reward_functions.resolve_reward_function(Reward(terms=terms))


def test_terms_are_parsed():
    text = "gsm8k[flexible]:1.0, format[think,answer]:.2,my.py:score:-0.1,model:2"
    assert parse_terms(text) == (
        Term("gsm8k", "flexible", 1.0),
        Term("format", "think,answer", 0.2),
        Term("my.py:score", "", -0.1),
        Term("model", "", 2.0),
    )
    assert [term.metric for term in parse_terms("my.py:score:1,auto:1")] == [
        "score_term",
        "auto_term",
    ]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("gsm8k", "'gsm8k' is not RULE:WEIGHT"),
        ("gsm8k:fast", "'gsm8k:fast' is not RULE:WEIGHT"),
        ("gsm8k:nan", "is not RULE:WEIGHT"),
        ("gsm8k:1,gsm8k[flexible]:1", "'gsm8k' occurs twice"),
        ("gsm9k:1", "no rule 'gsm9k'.*Did you mean 'gsm8k'"),
        ("gsm8k[lenient]:1", r"gsm8k\[lenient\]: expected one of strict, first, flexible"),
        ("length:1", r"length\[\]: expected the minimum and maximum"),
        ("length[9:5]:1", r"length\[9:5\]: expected"),
        ("format[<x>]:1", "expected tag names"),
        ("math[x]:1", "takes no argument"),
        ("absent.py:f:1", "config.reward.terms='absent.py:f': there is no file"),
    ],
)
def test_wrong_terms_are_named(terms, message):
    with pytest.raises(ValueError, match=message):
        resolve(terms)


def test_a_reward_adds_up_its_terms_and_reports_each(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTION)
    score = resolve(f"gsm8k[flexible]:1,format:0.25,length[1:3]:0.5,{tmp_path}/my.py:score:0.01")
    result = score(RewardRow("any", "42"), GOOD)
    assert result.score == pytest.approx(1 + 0.25 + 0.5 + 0.01 * len(GOOD))
    assert result.correct is True
    assert result.extra == {
        "gsm8k_term": 1.0,
        "format_term": 1.0,
        "length_term": 1.0,
        "score_term": len(GOOD),
        "answered": 1.0,
        "words": 2.0,
        "shouts": 0.0,
    }
    assert score(RewardRow("any", "42"), "42").extra["format_term"] == 0.0


def test_auto_is_the_rule_of_each_row():
    score = resolve("auto:2")
    assert score(RewardRow("openai/gsm8k", "4"), "#### 4").score == 2
    assert score(RewardRow("stories"), "happy fun").score == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"terms": "gsm8k:1,model:1"}, "`model:WEIGHT` and config.reward.model_path belong"),
        ({"terms": "exact:1", "url": "http://h/"}, "`judge:WEIGHT` and config.reward.url belong"),
        ({"terms": "gsm8k:1", "function": "m:f"}, "add m:f:1.0 to it"),
        ({"function": "m:f", "url": "http://h/"}, "reward.terms=m:f:1.0,judge:1.0"),
    ],
)
def test_terms_beside_what_they_replace_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        reward_functions.model_weight(Reward(**options))


def test_a_model_may_be_one_term_or_the_only_one():
    assert reward_functions.model_weight(Reward(terms="model:0.5,exact:1", model_path="m")) == 0.5
    assert reward_functions.model_weight(Reward(model_path="m")) == 1.0
    assert not reward_functions.has_rules(Reward(terms="model:0.5", model_path="m"))
    assert not reward_functions.has_rules(Reward(model_path="m"))
    assert reward_functions.has_rules(Reward(terms="model:0.5,exact:1", model_path="m"))


@pytest.mark.parametrize(
    ("terms", "source", "ground_truth", "message"),
    [
        ("gsm8k:1", "mine", "four", "'four' is not a number, as the rule 'gsm8k' requires"),
        ("", "math", "", "is empty or not text, as data_source='math' requires"),
        ("", "multiple_choice", "B or C", "'B or C' is not one letter"),
        ("", "multiple_choice", "2", "'2' is not one letter"),
        ("", "lighteval/MATH", "1}{2", "has braces that do not match"),
        ("", "lighteval/MATH", "9" * 501, "is not read whole"),
        ("", "aime2024", "5\n6", "is not read whole"),
        ("", "openai/gsm8k", ["4", "four"], "is not a number"),
        ("", "exact", [], "is empty"),
        ("", "searchR1_nq", {"answers": ["a"]}, "a dict with either as `target`"),
        ("", "regex", "(", "is not a regular expression"),
        ("", "json_schema", "{", "is not JSON"),
        ("auto:1", "", "", "the rows have no such column"),
    ],
)
def test_ground_truths_that_a_rule_cannot_use_are_refused(terms, source, ground_truth, message):
    with pytest.raises(UserError, match=message):
        row_rules.validate_data_sources([Example("q", source, ground_truth)], Reward(terms=terms))


def test_a_package_that_a_rule_needs_is_named_before_a_run(monkeypatch):
    examples = [Example("q", "openai/gsm8k", "1"), Example("q", "HuggingFaceH4/MATH-500", "1")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert row_rules.find_missing_package(examples) == (
        "data_source='HuggingFaceH4/MATH-500' needs the package math-verify: "
        "pip install 'jax_ppo[math]'"
    )
    assert "the rule 'json_schema' needs the package jsonschema" in (
        row_rules.find_missing_package(examples, Reward(terms="json_schema:1"))
    )
    assert not row_rules.find_missing_package(examples, Reward(terms="exact:1,my.py:f:1"))
    assert not row_rules.find_missing_package(examples, Reward(function="my.py:f"))


def test_rules_that_may_take_any_time_run_in_workers():
    def needs(source, **options):
        return reward_functions.needs_workers([Example("q", source, "1")], Reward(**options))

    assert needs("lighteval/MATH") and needs("regex") and not needs("openai/gsm8k")
    assert needs("openai/gsm8k", terms="math:1") and not needs("regex", terms="exact:1,model:1")
    assert needs("openai/gsm8k", terms="exact:1,my.py:f:1") and needs("stories", function="m:f")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox {x}", "x"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{} ", ""),
        ("42", None),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \frac{1}{\sqrt{2}}}", r"x = \frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\{1, 2\}} }", r"\{1, 2\}"),
        (r"so $\boxed 5$.", "5"),
        (r"\boxed42.", "42"),
        (r"\boxed -1.5 m", "-1.5"),
        (r"\boxed\frac{1}{2} is right", r"\frac{1}{2}"),
        (r"$\boxed B$", "B"),
        (r"\boxed{7}, in \boxed form", "7"),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    assert math_rules.last_boxed(text) == answer


@pytest.mark.parametrize(
    ("answer", "ground_truth", "correct"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"1,2", r"\{1,2\}", True),
        ("42", r"\boxed{42}", True),
        ("43", "42", False),
        ("", "42", False),
        (r"\frac{1}{", "42", False),
        ("9" * 501, "9" * 501, False),
        # Characters for LaTeX as in DAPO's rule, mixed numbers, units, and lists as text.
        ("√12", r"\sqrt{12}", True),
        ("x¹²", "x^{12}", True),
        ("30", "30°", True),
        ("∞", r"\infty", True),
        ("2.5", "2 1/2", True),
        ("1", "2 1/2", False),
        ("1 000/3", "1000/3", True),
        ("5 i", "5", False),
        ("18", "18 dollars", True),
        ("18cents", "18", True),
        (r"\text{June 20}", "June 20", True),
        ("∅", r"\varnothing", True),
        (r"12~\text{cm}", "12", True),
        ("2abc", "2", False),
        ("18", '["18"]', True),
        (r"\frac{1}{2}", r'["18", "\\frac{1}{2}"]', True),
        (r"\frac{1}{2}", r'["18", "\frac{1}{2}"]', True),
        (r"\sqrt{2}", r'["\sqrt{2}"]', True),
        ("19", '["18"]', False),
    ],
)
def test_answers_are_compared_as_mathematics(answer, ground_truth, correct):
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    assert math_rules.score_math(rf"\boxed{{{answer}}}", ground_truth).correct is correct


def test_the_library_of_mathematics_prints_nothing_of_its_time_limits():
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    score = (
        "from jax_ppo.rewards import math_rules\n"
        "assert math_rules.score_math(r'\\boxed{0.5}', '1/2').correct"
    )
    result = subprocess.run([sys.executable, "-c", score], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("A or C? I choose (B)", "B"),
        (r"\boxed{B}", "B"),
        (r"So $\boxed{\textbf{(B)}}$", "B"),
        ("#### B", "B"),
        ("It must be B", "B"),
        ("(B), no, (C)", "C"),
        ("Answer: A. No, the answer is B because it is round. I like C", "B"),
        ("**Answer:** **B**", "B"),
        ("The correct option is B) a cat", "B"),
        ("The answer is A because it is", "A"),
        ("(A) is wrong. Answer: B", "B"),
        ("(B) a cat", "B"),
        ("so B is the correct answer, as (A) is not", "B"),
        ("(B) is right. A is not correct", "B"),
        ("故选B。", "B"),
        ("**B. a cat**\n", "B"),
        ("The answer is **B** (a cat)", "B"),
        ("Answer: B/C", None),
        ("answer is A cat", None),
        ("the answer is a question of taste", None),
        ("The answer is I think unclear", None),
        ("Answer: A or B", None),
        ("Answer: A (or B)", None),
        ("The answer is not B", None),
        ("Because", None),
        ("", None),
        ("<think>Is it (A)? The answer is A</think>", None),
        ("<think>The answer is A</think>B", "B"),
        ("is it A? The answer is A</think>\n\nThe answer is B.", "B"),
        ("<think>A</think><answer>B</answer>", "B"),
        ("<answer> **B** </answer>", "B"),
        ("<answer>The answer is B.</answer>", "B"),
        ("<answer>a cat</answer>", None),
    ],
)
def test_choices(response, letter):
    result = text_rules.score_choice(response, "B")
    assert (result.answer, result.correct) == (letter, letter == "B")


STATEMENTS = (
    "The answer is @.",
    "Answer: @",
    "**Answer: (@)**",
    "the correct answer is: @) a cat",
    "#### @",
    r"So $\boxed{\text{@}}$",
    "@ is correct.",
    "The correct option is @.",
)
WORDS = st.lists(st.sampled_from("a cat sat think it was by an owl".split()), max_size=6)


@given(
    letters=st.lists(st.sampled_from("ABCDEFGHIJ"), min_size=3, max_size=3),
    statements=st.lists(st.sampled_from(STATEMENTS), min_size=3, max_size=3),
    words=st.lists(WORDS, min_size=2, max_size=2),
)
@settings(deadline=None)
def test_the_last_statement_after_the_thinking_is_the_choice(letters, statements, words):
    thought, first, last = (
        text.replace("@", letter) for text, letter in zip(statements, letters, strict=True)
    )
    before, after = map(" ".join, words)
    answer = f"{before}\n{first}\n{last}\n{after}"
    for thinking in ("", f"<think>{thought}</think>", f"{thought}</think>"):
        assert text_rules.score_choice(thinking + answer, letters[2]).correct, thinking + answer
    tagged = f"<think>{thought}</think> {first} <answer>@</answer> {after}"
    for form in ("@", "(@)", "@. a cat", statements[2]):
        response = tagged.replace("@", form.replace("@", letters[2]))
        assert text_rules.score_choice(response, letters[2]).correct, response


@given(st.sampled_from("Aa"), WORDS.filter(bool))
@settings(deadline=None)
def test_an_article_is_no_choice(article, words):
    for start in ("The answer is", "Answer:", "so it is"):
        response = f"{start} {article} {' '.join(words)}"
        assert text_rules.score_choice(response, "A").answer is None, response


TAGGED = (
    ("<think>At first the answer is A, but no.</think><answer>B</answer>", "B"),
    ("<think>6 times 7</think><answer>42</answer>", "42"),
    ("thinking that the template opened</think><answer>42</answer>", "42"),
    ("<reasoning>It is 41 or #### 43.</reasoning>\n<answer>\n42\n</answer>\n", "42"),
)


@pytest.mark.parametrize(("response", "truth"), TAGGED)
def test_answer_tags_work_with_every_rule_for_answers_and_with_format(response, truth):
    rules = ["exact", "math_dapo"]
    rules += ["math"] if importlib.util.find_spec("math_verify") else []
    rules += ["gsm8k", "gsm8k[flexible]", "sums", "arithmetic"] if truth == "42" else []
    rules += ["multiple_choice"] if truth == "B" else []
    form = "reasoning,answer" if "reasoning" in response else "think,answer"
    for rule in rules:
        row = RewardRow("any", truth, thought="<think>" * response.startswith("thinking that"))
        result = resolve(f"{rule}:1,format[{form}]:1")(row, response)
        assert (result.score, result.correct) == (2, True), rule
        wrong = response.replace(f"{truth}</answer>", "9</answer>").replace(f"\n{truth}\n", "9")
        assert not resolve(f"{rule}:1")(RewardRow("any", truth), wrong).correct, rule


def test_nothing_is_answered_within_the_thinking():
    for thinking in (
        "<think>{}",
        "<think>{}</think>",
        "{}</think> so",
        "<think>a</think><think>{}",
    ):
        for rule, text in (
            ("gsm8k", "#### 42"),
            ("sums", "42"),
            ("math", r"\boxed{42}"),
            ("math_dapo", "Answer: 42"),
            ("boxed", r"\boxed{42}"),
            ("exact", "42"),
            ("search_qa", "<answer>42</answer>"),
        ):
            result = resolve(f"{rule}:1")(RewardRow("any", "42"), thinking.format(text))
            assert result.correct is False, (rule, thinking)


@pytest.mark.parametrize(
    ("response", "correct", "is_json"),
    [
        ('{"a": 1}', True, 1),
        ('```json\n{"a": 1}\n```', True, 1),
        ('{"a": "1"}', False, 1),
        ("a", False, 0),
        ("[" * 100_000, False, 0),
    ],
)
def test_json(response, correct, is_json):
    pytest.importorskip("jsonschema")
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    result = text_rules.score_json(response, schema)
    assert (result.correct, result.extra["is_json"]) == (correct, is_json)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (GOOD, 1),
        (f"  {GOOD}\n", 1),
        (f"Well: {GOOD}", 0),
        (f"{GOOD} Done", 0),
        ("<answer>1</answer><think>2</think>", 0),
        ("<think>1</think><think>1</think><answer>2</answer>", 0),
        ("<think>1<answer>2</answer></think>", 0),
        ("<think>1</think> so <answer>2</answer>", 0),
        ("", 0),
        ("1</think>\n\n<answer>2</answer>", 0),
        ("<answer>2</answer>", 0),
        ("1</think></think><answer>2</answer>", 0),
        ("1</think>2</answer>", 0),
    ],
)
def test_format(response, score):
    assert text_rules.score_format(response, ("think", "answer")).score == score


def test_exact_regex_and_length():
    assert text_rules.score_exact(" yes\n", "yes").correct
    assert not text_rules.score_exact("Yes", "yes").correct
    assert text_rules.score_regex("it is 42", r"\b\d+$").correct
    assert not text_rules.score_regex("it is", r"\d").correct
    assert [text_rules.score_length("a b c", *bounds).score for bounds in ((1, 3), (4, 5))] == [
        1,
        0,
    ]


@pytest.mark.parametrize("mark", MARKS)
def test_an_answer_within_a_thought_that_the_prompt_has_opened_is_none(mark):
    """Regression: with a template that ends with <think>, `#### 5` in the thought scored 1."""
    forms = {
        **dict.fromkeys(["gsm8k", "gsm8k[flexible]", "sums", "arithmetic"], ("5", "#### 5")),
        "exact": ("5", "5"),
        "math_dapo": ("5", "Answer: 5"),
        "boxed": ("5", r"\boxed{5}"),
        "multiple_choice": ("B", "The answer is B"),
        "search_qa": ("Ulm", "<answer>Ulm</answer>"),
    }
    for rule, (truth, answer) in forms.items():
        score = resolve(f"{rule}:1")
        row = RewardRow("any", truth, thought=mark)
        assert not score(row, answer).correct, rule
        assert score(row, f"Is it 6?{MARKS[mark]}{answer}").correct, rule
        assert score(row._replace(thought=""), answer).correct, rule
    row = RewardRow("any", "^5$", thought=mark)
    assert resolve("regex:1")(row, "5").correct, "a pattern reads all of the response"


def test_the_format_has_its_first_tag_in_the_prompt_or_in_the_response():
    score, response = resolve("format[think,answer]:1"), "1</think><answer>2</answer>"
    assert score(RewardRow("any", thought="<think>"), response).score == 1
    assert score(RewardRow("any", thought="<think>"), f"<think>{response}").score == 0
    assert score(RewardRow("any"), response).score == 0
    assert score(RewardRow("any"), f"<think>{response}").score == 1
