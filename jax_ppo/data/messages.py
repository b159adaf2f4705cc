"""Prompts and responses in the columns of data sets: text, or messages of a chat."""

from typing import Any

from jax_ppo.errors import UserError, shorten

Messages = tuple[dict[str, str], ...]


def parse_prompt(value: Any, location: str, prompt_key: str) -> str | Messages:
    """Return a prompt: text, or messages without entries that are None."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = _as_messages(value, location, prompt_key)
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(
            f"{location}: {prompt_key} must be text or a list of messages, got {quote_value(value)}"
        )
    for message in value:
        if not is_message(message):
            raise UserError(
                f"{location}: each message of {prompt_key} must have role and content as text, got "
                f"{quote_value(message)}"
            )
    return tuple(
        {key: item for key, item in message.items() if item is not None} for message in value
    )


def _as_messages(value: dict[str, Any], location: str, prompt_key: str) -> list[dict[str, Any]]:
    """Return a single message as a list of one, and TFDS's lists by column as a list of rows."""
    if is_message(value):
        return [value]
    # Fields that a row lacks are None in Parquet.
    value = {key: column for key, column in value.items() if column is not None}
    lengths = {key: len(column) for key, column in value.items() if isinstance(column, list)}
    is_by_column = {"role", "content"} <= value.keys() == lengths.keys()
    if not is_by_column or len(set(lengths.values())) > 1:
        raise UserError(
            f"{location}: {prompt_key} must be a message whose role and content are text, or hold "
            f"lists of one length by column, got {quote_value(value)}"
        )
    rows = zip(*value.values(), strict=True)
    return [dict(zip(value, row, strict=True)) for row in rows]


def is_message(value: Any) -> bool:
    """Return whether a value is one message of a chat."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def user_message(text: str) -> Messages:
    """Return a chat that consists of one message of the user."""
    return ({"role": "user", "content": text},)


def quote_value(value: Any) -> str:
    """Return a value as text for an error message, cut to one short line."""
    return shorten(repr(value))
