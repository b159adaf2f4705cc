"""Rows with a prompt, and what else they have: nothing, a response, or two of which one is better.

    prompt                   text, or messages of a chat; its column is `data.prompt_key`
    prompt, completion       a demonstration, as TRL has it
    prompt, chosen, rejected a preference, as TRL has it; each is text or messages
    chosen, rejected         two lists of messages that differ in the last one
    messages                 a chat; if the assistant has the last word, that is the response
    instruction, input, output  Alpaca's form; the latter two may be absent
    question or problem      the message of a user

A text is a plain prompt, and messages are a chat that the chat template renders. `data_source` and
the reference answer, in the column `data.ground_truth_key`, may be absent: a reward model needs
neither.
"""

from typing import Any

from jax_ppo.data.columns import Columns, parse_ground_truth
from jax_ppo.data.messages import Messages, parse_prompt, shown
from jax_ppo.errors import UserError
from jax_ppo.types import Example

QUESTIONS = ("question", "problem")

Row = dict[str, Any]
Prompt = str | Messages


def parse_open_row(row: Row, where: str, columns: Columns) -> Example | None:
    """Return the example of a row, or `None` if it has no prompt.

    Args:
      row: columns by name.
      where: location of the row, for error messages.
      columns: names that options choose.

    Raises:
      UserError: a column has the wrong type.
    """
    response = rejected = None
    if {"chosen", "rejected"} <= row.keys():
        prompt, response, rejected = _parse_preference(row, where, columns.prompt)
    elif columns.prompt in row:
        prompt = parse_prompt(row[columns.prompt], where, columns.prompt)
        response = _parse_response(row.get("completion"), where, "completion")
    elif row.get("messages") is not None:
        prompt, response = _split_last_answer(row["messages"], where, "messages")
    elif "instruction" in row:
        prompt = _parse_instruction(row, where)
        response = _parse_response(row.get("output"), where, "output")
    else:
        question = next((name for name in QUESTIONS if name in row), None)
        if question is None:
            return None
        prompt = _user_message(_require_text(row[question], where, question))
    if response is None and isinstance(row.get(columns.response), str):
        response = row[columns.response]
    data_source = row.get("data_source") or ""
    used = {columns.prompt, "messages", "chosen", "rejected", "completion"}
    return Example(
        prompt=prompt,
        data_source=_require_text(data_source, where, "data_source"),
        ground_truth=parse_ground_truth(row.get(columns.ground_truth)),
        extra_info={name: value for name, value in row.items() if name not in used},
        response=response,
        rejected=rejected,
    )


def _parse_preference(row: Row, where: str, prompt_key: str) -> tuple[Prompt, str, str]:
    """Return prompt, preferred response and rejected response."""
    if prompt_key in row:
        prompt = parse_prompt(row[prompt_key], where, prompt_key)
        chosen, rejected = (
            _parse_response(row[name], where, name) for name in ("chosen", "rejected")
        )
        if chosen is None or rejected is None:
            raise UserError(f"{where}: chosen and rejected must both be set")
        return prompt, chosen, rejected
    (prompt, chosen), (other_prompt, rejected) = (
        _split_last_answer(row[name], where, name) for name in ("chosen", "rejected")
    )
    if chosen is None or rejected is None:
        raise UserError(f"{where}: the last message of chosen and rejected must be the assistant's")
    if prompt != other_prompt:
        raise UserError(f"{where}: chosen and rejected must differ in their last message alone")
    return prompt, chosen, rejected


def _parse_response(value: Any, where: str, name: str) -> str | None:
    """Return a response given as text, or as the only message of an assistant."""
    if value is None or isinstance(value, str):
        return value
    messages = parse_prompt(value, where, name)
    if isinstance(messages, str) or len(messages) != 1 or messages[0]["role"] != "assistant":
        raise UserError(
            f"{where}: {name} must be text or one message of the assistant, got {shown(value)}"
        )
    return messages[0]["content"]


def _split_last_answer(value: Any, where: str, name: str) -> tuple[Messages, str | None]:
    """Return the messages up to the assistant's last word, and that, if the chat ends with it."""
    messages = parse_prompt(value, where, name)
    if isinstance(messages, str):
        raise UserError(f"{where}: {name} must be a list of messages, got {shown(value)}")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise UserError(f"{where}: {name} has a message of the assistant and no prompt before it")
    return messages[:-1], messages[-1]["content"]


def _parse_instruction(row: Row, where: str) -> Messages:
    text = _require_text(row["instruction"], where, "instruction")
    given = row.get("input")
    if given:
        text = f"{text}\n\n{_require_text(given, where, 'input')}"
    return _user_message(text)


def _user_message(text: str) -> Messages:
    return ({"role": "user", "content": text},)


def _require_text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, got {shown(value)}")
    return value
