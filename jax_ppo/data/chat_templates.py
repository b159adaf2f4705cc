"""Chats as a model reads and writes them, by the tokenizer's chat template.

`MessageFrame` has what a template writes between two turns of the assistant, around messages of
another role:

    RESPONSE<|im_end|>
    <|im_start|>user
    <tool_response>
    CONTENT
    </tool_response><|im_end|>
    <|im_start|>assistant
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_ppo.data.messages import Messages, Prompt, add_response, is_prefilled, join_contents
from jax_ppo.data.tokenizer import Tokenizer, encode_text
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.thoughts import find_opened

# Whether the tokenizer's template renders chats, or the values of further variables in it.
ChatTemplate = bool | dict[str, Any]
Tools = Sequence[dict[str, Any]]

CHARACTERS_PER_TOKEN = 256  # few tokens have more: of a text to be cut off, no more is encoded
_LONGEST_MARK = 64  # tokens of the mark of a thought, which may be single characters
# Contents of messages that are rendered to find what a template writes around them.
_QUESTION, _RESPONSE = "a-question", "a-response"
_FIRST, _SECOND = "first-content", "second-content"


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, chat_template: ChatTemplate = True, tools: Tools = ()
) -> list[int]:
    """Return the token ids of a prompt, up to the first token of the response.

    A chat, with a tokenizer that has a chat template, becomes the template's text up to the
    assistant's turn; if the chat ends with a message of the assistant, up to the end of that
    message, which the response continues. The template writes all special tokens itself.

    Anything else becomes the text, or the contents of the messages joined by line breaks, with the
    special tokens that the tokenizer itself adds: Llama's adds BOS in its post-processor; Qwen2's
    and GPT-2's add none (although GPT-2's defines a BOS), and their models were trained without. An
    EOS that the tokenizer appends is removed, because the model must continue instead of stop.
    """
    return encode_text(tokenizer, *render_prompt(tokenizer, prompt, chat_template, tools))


def encode_responses(
    tokenizer: Tokenizer,
    prompt: Prompt,
    responses: Sequence[str],
    chat_template: ChatTemplate = True,
    tools: Tools = (),
) -> list[list[int]]:
    """Return the token ids of each response as it continues the prompt, with its end.

    In a chat that a template renders, they encode the template's text up to the special token that
    ends the turn. Elsewhere, and if the template writes none, the EOS is the end. A text that has
    the end already gets no second one. Raise `UserError` for a tokenizer without an EOS.

    They are the ids that follow the prompt's when both are encoded together, and so the ones that a
    model would sample: some tokenizers (Llama 2's) put a space before a text encoded on its own.
    If prompt and response merge into one token, the response is encoded on its own.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no EOS token to end responses with")
    text, special = render_prompt(tokenizer, prompt, chat_template, tools)
    prompt_ids = encode_text(tokenizer, text, special)

    def encode(response: str) -> list[int]:
        ids = encode_text(tokenizer, text + response, special)
        if ids[: len(prompt_ids)] == prompt_ids:
            return ids[len(prompt_ids) :]
        return encode_text(tokenizer, response, special=False)

    if isinstance(prompt, str) or special:
        return [ids if ids[-1:] == [eos] else [*ids, eos] for ids in map(encode, responses)]

    def render(response: str) -> str:
        return _apply_template(tokenizer, add_response(prompt, response), chat_template, tools)

    added = tokenizer.added_tokens_decoder.items()
    ends = {*tokenizer.all_special_ids, *(token for token, facts in added if facts.special)}
    continued = [_render_response(response, text, render) for response in responses]
    return [_end_turn(tokenizer, encode(response), ends) for response in continued]


def _render_response(response: str, text: str, render: Callable[[str], str]) -> str:
    """Return what the chat template writes after the prompt's text for a response."""
    whole = render(response)
    # A thought that the prompt has opened is not opened again.
    opened = find_opened(text)
    if opened and response.lstrip().startswith(opened):
        response = response.lstrip().removeprefix(opened).lstrip()
    is_kept = "".join(response.split()) in "".join(whole[len(text) :].split())
    if whole.startswith(text) and is_kept:
        return whole[len(text) :]
    # Templates that begin the assistant's turn with more than they keep in a finished one, or drop
    # the thoughts of a finished one: the response follows the prompt, as when it is sampled.
    mark = "response-mark"
    _, found, end = render(mark).rpartition(mark)
    if not found:
        raise UserError("the chat template leaves out or changes what the assistant says")
    return response + end


def _end_turn(tokenizer: Tokenizer, ids: list[int], ends: set[int]) -> list[int]:
    """Return a turn up to the special token at its end, or with an EOS if it has none."""
    for last in reversed(range(len(ids))):
        if ids[last] in ends:
            # A text may end with the token that the template writes after it.
            first = last
            while first and ids[first - 1] == ids[last]:
                first -= 1
            return ids[: first + 1]
        # A template may write white space after the end of the turn.
        if str(tokenizer.decode(ids[last:])).strip():
            break
    return [*ids, tokenizer.eos_token_id]


def render_prompt(
    tokenizer: Tokenizer, prompt: Prompt, chat_template: ChatTemplate, tools: Tools = ()
) -> tuple[str, bool]:
    """Return the text, and whether the tokenizer adds its special tokens to it."""
    if isinstance(prompt, str):
        return prompt, True
    if chat_template is not False and tokenizer.chat_template:
        if is_prefilled(prompt) and len(prompt) > 1 and not prompt[-1]["content"].strip():
            return render_prompt(tokenizer, prompt[:-1], chat_template, tools)  # nothing is begun
        kind = "continue_final_message" if is_prefilled(prompt) else "add_generation_prompt"
        text = _apply_template(tokenizer, prompt, chat_template, tools, **{kind: True})
        if is_prefilled(prompt):
            # transformers may cut the white space at its end, which the response continues.
            content = prompt[-1]["content"]
            text = text.rstrip() + content[len(content.rstrip()) :]
        return text, False
    return join_contents(prompt), True


def _apply_template(
    tokenizer: Tokenizer,
    messages: Messages,
    chat_template: ChatTemplate,
    tools: Tools,
    **ending: bool,
) -> str:
    variables = chat_template if isinstance(chat_template, dict) else {}
    arguments = {**variables, **ending, "tools": list(tools) or None}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))


def opened_thought(tokenizer: Any, prompt: Prompt, ids: Sequence[int] | np.ndarray) -> str:
    """Return the mark of the thought that a prompt, `ids` as tokens, opens, "" if none."""
    begun = prompt[-1]["content"] if not isinstance(prompt, str) and is_prefilled(prompt) else ""
    (end,) = tokenizer.batch_decode([ids[-_LONGEST_MARK:]], skip_special_tokens=False)
    return find_opened(end, begun)


def validate_chat_template(tokenizer: Any, chat_template: ChatTemplate) -> None:
    """Raise `UserError` if the chat template does not read the variables that an option sets."""
    if not isinstance(chat_template, dict) or not chat_template:
        return
    option = f"config.data.chat_template_kwargs={chat_template}"
    if not tokenizer.chat_template:
        raise UserError(f"{option}: the tokenizer has no chat template that could read them")
    reserved = {
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *("messages", "raise_exception", "strftime_now", "namespace", "range"),
        *tokenizer.special_tokens_map,
    }
    known = sorted(template_variables(tokenizer) - reserved)
    for name in chat_template:
        if name not in known:
            raise UserError(
                f"{option}: the tokenizer's chat template has no variable {name!r}; it reads "
                f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}"
            )


def function_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates read it: one of MCP, or a bare function, is wrapped."""
    if "function" in tool or "name" not in tool:
        return tool
    function = {"parameters" if name == "inputSchema" else name: x for name, x in tool.items()}
    return {"type": "function", "function": function}


def template_variables(tokenizer: Any) -> set[str]:
    """Return the names that the tokenizer's chat template reads; none without a template."""
    import jinja2.ext
    import jinja2.meta

    template = tokenizer.chat_template
    if not template:
        return set()
    if isinstance(template, dict):  # several by name
        template = "".join(template.values())
    # As transformers parses templates, except for its tag {% generation %}, which has no variables.
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    return jinja2.meta.find_undeclared_variables(environment.parse(template))


class MessageFrame:
    """The tokens around contents of messages that answer the assistant; `overhead` is their number.

    Contents are encoded by themselves, and no text in them becomes a special token: what a tool or
    a server returns cannot end the message that it stands in.
    """

    def __init__(self, tokenizer: Tokenizer, role: str, chat_template: ChatTemplate) -> None:
        """Render messages of a role, such as "tool"; raise `ValueError` if the template cannot."""

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
            _, found, after = text.rpartition(_RESPONSE)
            if not found:
                raise ValueError("it leaves out what the assistant says")
            return after

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

        `last` is the last token of the turn; if it ends a turn already, the frame does not repeat
        it. Contents are cut to equal shares of what the frame leaves of `length` tokens.
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
