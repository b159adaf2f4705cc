"""Conversion of rows to examples by the options: columns, and additions to every prompt."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.data import row_formats
from jax_ppo.data.columns import Columns
from jax_ppo.data.messages import Messages, is_prefilled
from jax_ppo.errors import UserError, shorten
from jax_ppo.storage import paths
from jax_ppo.types import Example

PLACEHOLDER = "{prompt}"


@dataclasses.dataclass(frozen=True)
class RowParser:
    """Conversion of rows to examples."""

    columns: Columns = dataclasses.field(default_factory=Columns)
    instruction: str = ""  # text added to the question in rows of some forms
    system_prompt: str = ""  # message in front of every chat; "" adds none
    template: str = ""  # text around every prompt; "" leaves it as it is

    def parse(self, row: dict[str, Any], location: str) -> Example:
        """Return the example of a row; messages name its location."""
        example = row_formats.parse_row(row, location, self.columns, self.instruction)
        [shaped] = shape_prompts([example], self.system_prompt, self.template, location)
        return shaped


def shape_prompts(
    examples: Sequence[Example], system_prompt: str, template: str, name: str
) -> list[Example]:
    """Return the examples of an option, `name`, with a system message and a template; "" adds none.

    Raises:
      UserError: a system message is set, and a prompt is plain text.
    """
    shaped = []
    for row, example in enumerate(examples, 1):
        prompt = example.prompt
        if template:
            prompt = _fill_template(template, prompt)
        if system_prompt:
            if isinstance(prompt, str):
                raise UserError(
                    f"config.data.system_prompt={shorten(system_prompt)!r}: the prompt of "
                    f"{example.describe_location(row, name)} is plain text and cannot have a "
                    "system message; use config.data.prompt_template"
                )
            prompt = _add_system_message(system_prompt, prompt)
        shaped.append(dataclasses.replace(example, prompt=prompt))
    return shaped


def count_system_messages(examples: Sequence[Example], text: str) -> int:
    """Return how many chats have another system message than this text; 0 if it is empty."""
    systems = [
        example.prompt[0]
        for example in examples
        if not isinstance(example.prompt, str) and example.prompt[0]["role"] == "system"
    ]
    return sum(bool(text) and message["content"] != text for message in systems)


def read_template(option: str) -> str:
    """Return the text of `data.prompt_template`, read from its file if it is `@FILE`.

    Raises:
      UserError: there is no such file, or the text lacks the placeholder.
    """
    text = option
    if option.startswith("@"):
        path: Path = paths.expand_local_path(option[1:], "config.data.prompt_template")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"config.data.prompt_template={option!r}: cannot be read as text: {error}"
            ) from error
    if text and PLACEHOLDER not in text:
        raise UserError(
            f"config.data.prompt_template={shorten(option)!r}: expected text with {PLACEHOLDER}, "
            "or @FILE with such text"
        )
    return text


def _fill_template(template: str, prompt: str | Messages) -> str | Messages:
    """Insert a plain-text prompt, or the last message of a chat, into the template."""
    if isinstance(prompt, str):
        return template.replace(PLACEHOLDER, prompt)
    # A beginning of the response stays behind the message that it answers.
    index = len(prompt) - 1 - (is_prefilled(prompt) and len(prompt) > 1)
    last = prompt[index] | {"content": template.replace(PLACEHOLDER, prompt[index]["content"])}
    return (*prompt[:index], last, *prompt[index + 1 :])


def _add_system_message(text: str, prompt: Messages) -> Messages:
    """Put the message first; it replaces the chat's own system message."""
    if prompt[0]["role"] == "system":
        prompt = prompt[1:]
    return ({"role": "system", "content": text}, *prompt)
