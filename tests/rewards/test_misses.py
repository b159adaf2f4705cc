"""Wrong responses next to what the rule looked for."""

from jax_ppo.config.schema import Reward
from jax_ppo.rewards.batch import LONGEST_ANSWER, describe_misses, score_batch, scored_misses
from jax_ppo.rewards.reward_functions import is_by_rules, resolve_reward_function
from jax_ppo.types import Example

TRUTH = "72"


def describe(texts, source="openai/gsm8k", truth=TRUTH, options=None):
    options = options or Reward()
    examples = [Example("question", source, ground_truth=truth) for _ in texts]
    scored = score_batch(resolve_reward_function(options), examples, texts)
    return describe_misses(scored_misses(examples, texts, scored), is_by_rules(options))


def test_a_function_is_not_said_to_have_looked_for_a_reference_that_it_may_not_read(tmp_path):
    """Regression: "looked for '72'" of a function that counts characters."""
    (tmp_path / "mine.py").write_text(
        "def short(data_source, solution_str, ground_truth, extra_info):\n"
        "    answer = {'pred': 'x'} if solution_str == 'both' else {}\n"
        "    return {'score': 0, 'acc': len(solution_str) < 3, **answer}\n"
    )
    options = Reward(function=f"{tmp_path}/mine.py:short")
    assert describe(["abcd", "both", "ok"], options=options) == (
        "the reference is '72', read 'x' in 'both'",
        "the reference is '72', the response is 'abcd'",
    )
    assert describe(["abcd"], truth="", options=options) == ("the response is 'abcd'",)
    terms = Reward(terms=f"gsm8k:1,{tmp_path}/mine.py:short:1")
    assert not describe(["#### 7"], options=terms)[0].startswith("looked for")


def test_the_nearest_misses_come_first_and_say_what_was_read():
    lines = describe(["nothing", "#### 7", "the answer is 72.", "#### 72", "#### 72 or #### 8"])
    assert lines == (
        "looked for '72', in 'the answer is 72.'",
        "looked for '72', read '8' in '#### 72 or #### 8'",
        "looked for '72', read '7' in '#### 7'",
    )


def test_equal_misses_are_shown_once_and_long_ones_by_their_end():
    (line,) = describe(["x" * 500] * 4)
    assert line == f"looked for '72', in ...{'x' * 80!r}"
    assert describe(["#### 72"] * 3) == ()


def test_what_could_move_a_cursor_is_escaped():
    (line,) = describe(["\x1b[2J"])
    assert line == "looked for '72', in '\\x1b[2J'"


def test_an_answer_within_a_thought_is_shown_as_such():
    (line,) = describe(["<think>#### 72"])
    assert line == "looked for '72', in a thought that does not end: '<think>#### 72'"


def test_long_answers_are_cut():
    examples = [Example("question", "exact", ground_truth=TRUTH)]
    scored = score_batch(resolve_reward_function(Reward()), examples, ["y" * 5000])
    assert scored.answers == ["y" * LONGEST_ANSWER]
