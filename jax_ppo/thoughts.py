"""Thoughts: the text of a model before its answer, between marks that chat templates may write."""

import re

# The mark that begins a thought, and the one after which the answer follows.
MARKS = {
    "<think>": "</think>",  # Qwen3, DeepSeek R1, GLM, MiniMax
    "<thinking>": "</thinking>",
    "<reasoning>": "</reasoning>",
    "<thought>": "</thought>",  # EXAONE Deep
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Magistral
    "◁think▷": "◁/think▷",  # Kimi
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}

_START = re.compile("|".join(map(re.escape, MARKS)))
_END = re.compile("|".join(map(re.escape, MARKS.values())))
_OPENED = re.compile(rf"(?:{_START.pattern})\s*\Z")


def is_part_of_mark(text: str) -> bool:
    """Return whether a token with this text may belong to a mark."""
    return any(text in mark for pair in MARKS.items() for mark in pair)


def after_thinking(text: str) -> str:
    """Return the text after the last thought; if that does not end, the text before it."""
    return _START.split(_END.split(text)[-1])[0]


def find_opened(prompt: str, begun: str = "") -> str:
    """Return the mark of the thought that a prompt's end, or a `begun` reply, opens, or ""."""
    match = _OPENED.search(prompt) or _START.search(_END.split(begun)[-1])
    return match[0].rstrip() if match else ""


def close_thought(mark: str, response: str) -> str:
    """Return the response to a prompt that opens a thought, closed before a reply without one."""
    is_closed = not mark or _END.search(response)
    return response if is_closed else f"\n{MARKS[mark]}\n\n{response.lstrip()}"
