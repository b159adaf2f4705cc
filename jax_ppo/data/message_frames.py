"""What a chat template writes between two turns of the assistant, around messages of another role.

    RESPONSE<|im_end|>
    <|im_start|>user
    <tool_response>
    CONTENT
    </tool_response><|im_end|>
    <|im_start|>assistant

Contents are encoded by themselves, and no text in them becomes a special token: what a tool or a
server returns cannot end the message that it stands in.
"""

import re
from collections.abc import Sequence

from jax_ppo.data.tokenizer import ChatTemplate, Tokenizer, encode_text, render_prompt

# Of a text that will be cut off, no more is encoded; few tokens have as many characters.
CHARACTERS_PER_TOKEN = 256
_QUESTION, _RESPONSE, _FIRST, _SECOND = (
    "a-question",
    "a-response",
    "first-content",
    "second-content",
)


class MessageFrame:
    """The tokens around the contents of messages that answer the assistant.

    Attributes:
      overhead: the number of tokens around one content.
    """

    def __init__(self, tokenizer: Tokenizer, role: str, chat_template: ChatTemplate) -> None:
        """Render messages of a role, such as "tool", with the tokenizer's chat template.

        Raises:
          ValueError: the template does not render a message of this role after the assistant's.
        """

        def render(*contents: str) -> str:
            chat = (
                {"role": "user", "content": _QUESTION},
                {"role": "assistant", "content": _RESPONSE},
                *({"role": role, "content": content} for content in contents),
            )
            try:
                text, _ = render_prompt(tokenizer, chat, chat_template)
            except Exception as error:  # of a template, which may refuse a role in its own words
                raise ValueError(f"{type(error).__name__}: {error}") from error
            return text.rpartition(_RESPONSE)[2]

        before, content, after = render(_FIRST).partition(_FIRST)
        if not content:
            raise ValueError("it leaves the message out")
        self._tokenizer = tokenizer
        self._before = encode_text(tokenizer, before, special=False)
        self._after = encode_text(tokenizer, after, special=False)
        self.overhead = len(self._before) + len(self._after)
        between = "\n"
        if role == "tool":
            between = render(_FIRST, _SECOND).partition(_FIRST)[2].partition(_SECOND)[0]
        self._between = encode_text(tokenizer, between, special=False)
        added = tokenizer.added_tokens_decoder.values()
        texts = sorted((str(token) for token in added), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def encode(self, contents: Sequence[str], last: int, length: int) -> list[int]:
        """Return the tokens of messages, from the end of the assistant's turn to its next one.

        Args:
          contents: of one message or more.
          last: the last token of the turn; if it ends a turn already, the frame does not repeat it.
          length: the most tokens. Contents are cut to equal shares of what the frame leaves.
        """
        before = self._before[1:] if self._before[:1] == [last] else self._before
        room = length - self.overhead - len(self._between) * (len(contents) - 1)
        share = max(room, 0) // len(contents)
        tokens = list(before)
        for number, content in enumerate(contents):
            tokens += self._between if number else []
            tokens += self._encode_content(content, share)
        return [*tokens, *self._after][:length]

    def _encode_content(self, content: str, length: int) -> list[int]:
        content = content[: CHARACTERS_PER_TOKEN * length]
        tokens: list[int] = []
        start = 0
        # The name of a special token is encoded in two parts, so that it becomes plain text.
        for match in self._special.finditer(content):
            cut = match.start() + 1
            tokens += encode_text(self._tokenizer, content[start:cut], special=False)
            start = cut
        tokens += encode_text(self._tokenizer, content[start:], special=False)
        return tokens[:length]
