"""Marks of thoughts: what follows a thought, and which marks a prompt has left open."""

import pytest

from jax_ppo.thoughts import MARKS, after_thinking, close_thought, find_opened


@pytest.mark.parametrize(("start", "end"), MARKS.items())
def test_only_what_follows_a_thought_that_ends_is_read(start, end):
    assert after_thinking(f"{start}\nIs it 4?{end}\n\n5") == "\n\n5"
    assert after_thinking(f"{start}\nIs it 4? 5") == ""
    assert after_thinking(f"Is it 4?{end}5") == "5"


@pytest.mark.parametrize(("start", "end"), MARKS.items())
def test_a_prompt_opens_a_thought_with_a_mark_at_its_end(start, end):
    assert find_opened(f"[assistant]\n{start}\n\n") == start
    assert find_opened(f"[assistant]\n{start}\n\n{end}\n") == ""
    assert find_opened(f"[user] Begin with {start}. [assistant]\n") == "", "only talks of it"
    assert find_opened("", f"{start}a{end} b {start}c") == start
    assert find_opened("", f"{start}a{end} b") == ""


@pytest.mark.parametrize(("start", "end"), MARKS.items())
def test_a_reply_without_a_thought_closes_the_one_that_is_open(start, end):
    assert close_thought(start, " 5") == f"\n{end}\n\n5"
    assert close_thought(start, f"4?{end}5") == f"4?{end}5"
    assert close_thought("", "5") == "5"
