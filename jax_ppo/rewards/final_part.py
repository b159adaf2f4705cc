"""The part of a response that the rules for answers read: never the thinking."""

import re

THINKING_TAGS = ("think", "thinking", "reasoning", "thought")
_END = re.compile(rf"</(?:{'|'.join(THINKING_TAGS)})>")
_START = re.compile(rf"<(?:{'|'.join(THINKING_TAGS)})>")


def after_thinking(response: str) -> str:
    """Return the text after the thinking, which the chat template or the response has opened.

    If the thinking does not end, only the text before it counts.
    """
    return _START.split(_END.split(response)[-1])[0]


def read_final_part(response: str) -> tuple[str, bool]:
    """Return the part of a response that answers, and whether `<answer>` tags mark it.

    It is the content of the last `<answer>...</answer>` after the thinking, or else all text after
    the thinking.
    """
    text = after_thinking(response)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if closed and opened:
        return answer.strip(), True
    return text, False
