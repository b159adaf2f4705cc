import time

import pytest

from jax_ppo.rewards import text_rules


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
    result = text_rules.score_story(text)
    assert result.score == pytest.approx(score)
    assert result.correct is None
    assert result.extra["joyful_words"] >= round(score * 5)


def test_a_choice_is_sought_in_a_moment():
    started = time.process_time()
    assert text_rules.score_choice("A. x" + " " * 40_000 + "\ny", "A").answer is None
    assert time.process_time() - started < 1  # 5 s where blanks are matched in two ways
