"""Prompts and responses in the columns of data sets: text, or messages of a chat.

Messages have `role` and `content`, or `from` and `value` as in ShareGPT's form. A text that is the
JSON of messages, as CSV files hold them, is read as such.
"""

import contextlib
import json
import re
from typing import Any

from jax_ppo.errors import UserError, shorten

Messages = tuple[dict[str, Any], ...]
Prompt = str | Messages

PLACEHOLDER = "{prompt}"  # in a template around prompts

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_TEXT_PARTS = (None, "text", "input_text", "output_text")  # the types of parts that are text
_MESSAGE_START = re.compile(r'\{"(role":"\w+","(content|tool_calls)|from":"\w+","value)"')
# What the assistant says besides a message's content.
_SAID_BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def parse_prompt(value: Any, location: str, prompt_key: str) -> str | Messages:
    """Return a prompt: text, or messages without entries that are None."""
    if isinstance(value, str):
        value = _parse_text(value, location, prompt_key)
        if isinstance(value, str):
            return value
    if isinstance(value, dict) and value:
        value = _as_messages(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(
            f"{location}: {prompt_key} must be text or a list of messages, got {quote_cell(value)}"
        )
    return tuple(_parse_message(message, location, prompt_key) for message in value)


def _parse_text(text: str, location: str, prompt_key: str) -> Any:
    """Return messages that a text holds as JSON, or else the text."""
    start = "".join(text.lstrip()[:80].split()).removeprefix("array(").lstrip("[")
    if start.startswith(("{'role'", "{'content'", "{'from'", "{'value'")):
        raise UserError(
            f"{location}: {prompt_key} holds messages as Python prints them; write JSON (in Python "
            f"json.dumps), got {quote_cell(text)}"
        )
    if not start.startswith('{"'):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        # Other text after the JSON shows that it is only quoted.
        if _MESSAGE_START.match(start) and text.rstrip()[-1] in "]}":
            raise UserError(
                f"{location}: {prompt_key} holds messages that are not JSON ({error}), got "
                f"{quote_cell(text)}"
            ) from error
        return text
    messages = value if isinstance(value, list) else [value]
    return messages if all(map(_resembles_message, messages)) else text


def _resembles_message(value: Any) -> bool:
    """Return whether a value of JSON is a message, rather than other data with a role or sender."""
    if not isinstance(value, dict):
        return False
    if "role" in value:
        return isinstance(value["role"], str) and ("content" in value or "tool_calls" in value)
    return {"from", "value"} <= value.keys()


def _parse_message(message: Any, location: str, name: str) -> dict[str, Any]:
    is_text = False
    if isinstance(message, dict):
        if {"from", "value"} <= message.keys() and "role" not in message:
            if str(message["from"]).lower() not in _ROLES:
                raise UserError(
                    f"{location}: {name} has a message from {quote_cell(message['from'])}; "
                    f"expected one of {', '.join(_ROLES)}"
                )
            message = {"role": str(message["from"]), "content": message["value"]}
        message = drop_missing(message)
        content = message.get("content")
        role = message.get("role")
        if isinstance(role, str):
            message["role"] = _ROLES.get(role.lower(), role)
        if message.get("tool_calls"):
            message["tool_calls"] = _read_calls(message["tool_calls"], location, name)
        if isinstance(content, list):
            message["content"] = _join_parts(content, location, name)
        elif content is None and message.get("tool_calls"):
            message["content"] = ""
        is_text = isinstance(role, str) and isinstance(message.get("content"), str)
    if not is_text:
        raise UserError(
            f"{location}: each message of {name} must have role and content as text, got "
            f"{quote_cell(message)}"
        )
    return message


def _read_calls(calls: Any, location: str, name: str) -> list[dict[str, Any]]:
    """Return calls of tools as templates read them: they would quote arguments that are text."""
    calls = from_json(calls)
    is_list = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    if not is_list or not all(isinstance(call.get("function", call), dict) for call in calls):
        raise UserError(
            f"{location}: tool_calls of {name} must be a list of objects, got {quote_cell(calls)}"
        )
    for call in calls:
        function = call.get("function", call)
        arguments = from_json(function.get("arguments"))
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return calls


def from_json(value: Any) -> Any:
    """Return what a text holds as JSON; any other value as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _join_parts(parts: list[Any], location: str, name: str) -> str:
    for part in parts:
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        if not is_text or part.get("type") not in _TEXT_PARTS:
            raise UserError(
                f"{location}: a message of {name} has a part that is not text, "
                f"{quote_cell(part)}; images, audio and video are not supported"
            )
    return "".join(part["text"] for part in parts)


def _as_messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return TFDS's lists by column as a list of messages, and any other object as the only one."""
    # Fields that a row lacks are None in Parquet.
    columns = {key: column for key, column in value.items() if column is not None}
    lengths = {key: len(column) for key, column in columns.items() if isinstance(column, list)}
    is_by_column = {"role", "content"} <= columns.keys() == lengths.keys()
    if not is_by_column or len(set(lengths.values())) > 1:
        return [value]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def drop_missing(value: Any) -> Any:
    """Return a value without the entries that are None, which Parquet adds to objects."""
    if isinstance(value, dict):
        return {key: drop_missing(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_missing(item) for item in value]
    return value


def response_text(message: dict[str, Any], location: str, name: str, is_learned: bool) -> str:
    """Return a message's text; raise `UserError` if one that `is_learned` has more than that."""
    if is_learned and (beside := [key for key in _SAID_BESIDE if message.get(key)]):
        raise UserError(
            f"{location}: {beside[0]} of the last message of {name} is not learned; write it into "
            "the message's content, or set config.supervised.response_key to a column"
        )
    return str(message["content"])


def prompt_texts(prompt: str | Messages) -> list[str]:
    """Return the contents of a chat's messages, or a plain prompt as the only text."""
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def join_contents(prompt: str | Messages) -> str:
    """Return a prompt as text: the contents of a chat's messages are joined by line breaks."""
    return "\n".join(prompt_texts(prompt))


def user_message(text: str) -> Messages:
    """Return a chat that consists of one message of the user."""
    return ({"role": "user", "content": text},)


def add_response(prompt: Messages, response: str) -> Messages:
    """Return a chat with the assistant's message, whose beginning may be in the prompt."""
    if is_prefilled(prompt):
        return (*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + response})
    return (*prompt, {"role": "assistant", "content": response})


def is_prefilled(prompt: str | Messages) -> bool:
    """Return whether a chat ends with the beginning of the assistant's message."""
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def shape_prompt(prompt: Prompt, system_prompt: str, template: str, location: str) -> Prompt:
    """Return a prompt with a system message and a template around it; "" adds none.

    A system message replaces the chat's own; raise `UserError` for one with plain text. The
    template surrounds plain text, or the last message of a chat; a beginning of the response stays
    behind the message that it answers.
    """
    if isinstance(prompt, str):
        if system_prompt:
            raise UserError(
                f"config.data.system_prompt={shorten(system_prompt)!r}: the prompt of {location} "
                "is plain text and cannot have a system message; use config.data.prompt_template"
            )
        return template.replace(PLACEHOLDER, prompt) if template else prompt
    messages = list(prompt)
    if template:
        asked = len(messages) - 1 - (is_prefilled(prompt) and len(messages) > 1)
        content = template.replace(PLACEHOLDER, messages[asked]["content"])
        messages[asked] = messages[asked] | {"content": content}
    if system_prompt:
        has_own = messages[0]["role"] == "system"
        messages[:has_own] = [{"role": "system", "content": system_prompt}]
    return tuple(messages)


def quote_cell(value: Any) -> str:
    """Return a value as text for an error message, cut to one short line."""
    return shorten(repr(value))
