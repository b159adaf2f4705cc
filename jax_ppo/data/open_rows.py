"""Rows with a prompt alone, with a response, or with a preferred and a rejected response.

    prompt                   text, or messages of a chat; its column is `data.prompt_key`
    prompt, completion       a demonstration in TRL's form
    prompt, chosen, rejected a preference in TRL's form; each is text or messages
    chosen, rejected         two lists of messages that differ in the last one
    messages                 a chat; if the last message is the assistant's, it is the response
    instruction, input, output  Alpaca's form; the latter two may be absent
    question or problem      the message of a user

A text is a plain prompt, and messages are a chat that the chat template renders. `data_source` and
the reference answer, in the column `data.ground_truth_key`, may be absent: a reward model needs
neither.
"""

from typing import Any, NamedTuple

from jax_ppo.data.columns import Columns, parse_ground_truth
from jax_ppo.data.messages import Messages, parse_prompt, quote_value, user_message
from jax_ppo.errors import UserError
from jax_ppo.types import Example

QUESTIONS = ("question", "problem")

Row = dict[str, Any]
Prompt = str | Messages


class _Texts(NamedTuple):
    """The prompt of a row and its responses."""

    prompt: Prompt
    response: str | None = None
    rejected: str | None = None


def parse_open_row(row: Row, location: str, columns: Columns) -> Example | None:
    """Return the example of a row, or `None` if it has no prompt.

    Args:
      row: columns by name.
      location: place of the row in the data, for error messages.
      columns: names of columns that options set.

    Raises:
      UserError: a column has the wrong type.
    """
    texts = _parse_texts(row, location, columns.prompt)
    if texts is None:
        return None
    response = texts.response
    if response is None and isinstance(row.get(columns.response), str):
        response = row[columns.response]
    data_source = row.get("data_source") or ""
    parsed_columns = {columns.prompt, "messages", "chosen", "rejected", "completion"}
    return Example(
        prompt=texts.prompt,
        data_source=_require_text(data_source, location, "data_source"),
        ground_truth=parse_ground_truth(row.get(columns.ground_truth)),
        extra_info={name: value for name, value in row.items() if name not in parsed_columns},
        response=response,
        rejected=texts.rejected,
    )


def _parse_texts(row: Row, location: str, prompt_key: str) -> _Texts | None:
    """Return the texts of the first form that the row has; `None` if it has none of the forms."""
    if {"chosen", "rejected"} <= row.keys():
        return _parse_preference(row, location, prompt_key)
    if prompt_key in row:
        prompt = parse_prompt(row[prompt_key], location, prompt_key)
        return _Texts(prompt, _parse_response(row.get("completion"), location, "completion"))
    if row.get("messages") is not None:
        return _Texts(*_split_last_answer(row["messages"], location, "messages"))
    if "instruction" in row:
        instruction = _parse_instruction(row, location)
        return _Texts(instruction, _parse_response(row.get("output"), location, "output"))
    for name in QUESTIONS:
        if name in row:
            return _Texts(user_message(_require_text(row[name], location, name)))
    return None


def _parse_preference(row: Row, location: str, prompt_key: str) -> _Texts:
    if prompt_key in row:
        prompt = parse_prompt(row[prompt_key], location, prompt_key)
        chosen = _parse_response(row["chosen"], location, "chosen")
        rejected = _parse_response(row["rejected"], location, "rejected")
        if chosen is None or rejected is None:
            raise UserError(f"{location}: chosen and rejected must both be set")
        return _Texts(prompt, chosen, rejected)
    prompt, chosen = _split_last_answer(row["chosen"], location, "chosen")
    other_prompt, rejected = _split_last_answer(row["rejected"], location, "rejected")
    if chosen is None or rejected is None:
        raise UserError(
            f"{location}: the last message of chosen and rejected must be the assistant's"
        )
    if prompt != other_prompt:
        raise UserError(f"{location}: chosen and rejected must differ only in their last message")
    return _Texts(prompt, chosen, rejected)


def _parse_response(value: Any, location: str, name: str) -> str | None:
    """Return a response given as text, or as the only message of an assistant."""
    if value is None or isinstance(value, str):
        return value
    messages = parse_prompt(value, location, name)
    if isinstance(messages, str) or len(messages) != 1 or messages[0]["role"] != "assistant":
        raise UserError(
            f"{location}: {name} must be text or one message of the assistant, got "
            f"{quote_value(value)}"
        )
    return messages[0]["content"]


def _split_last_answer(value: Any, location: str, name: str) -> tuple[Messages, str | None]:
    """Return the messages before a final one of the assistant, and the text of that one."""
    messages = parse_prompt(value, location, name)
    if isinstance(messages, str):
        raise UserError(f"{location}: {name} must be a list of messages, got {quote_value(value)}")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise UserError(
            f"{location}: {name} has a message of the assistant but no prompt before it"
        )
    return messages[:-1], messages[-1]["content"]


def _parse_instruction(row: Row, location: str) -> Messages:
    text = _require_text(row["instruction"], location, "instruction")
    if row.get("input"):
        text = f"{text}\n\n{_require_text(row['input'], location, 'input')}"
    return user_message(text)


def _require_text(value: Any, location: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{location}: {name} must be text, got {quote_value(value)}")
    return value
