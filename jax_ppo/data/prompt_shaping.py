"""What options add to every prompt: a system message, and a template around the question."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax_ppo.data.messages import Messages
from jax_ppo.errors import UserError, shorten
from jax_ppo.storage import paths
from jax_ppo.types import Example

PLACEHOLDER = "{prompt}"


def shape_prompts(
    examples: Sequence[Example], system_prompt: str, template: str, name: str
) -> list[Example]:
    """Return the examples with the system message and the template of the options.

    Args:
      examples: the rows.
      system_prompt: `data.system_prompt`; "" adds none.
      template: of `read_template`; "" leaves prompts as they are.
      name: the option that names the rows, for messages.

    Raises:
      UserError: a prompt of plain text would need a system message.
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
                    f"{name}, example {row}, is plain text and takes no system message; use "
                    "config.data.prompt_template"
                )
            prompt = _add_system_message(system_prompt, prompt)
        shaped.append(dataclasses.replace(example, prompt=prompt))
    return shaped


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
            "or @FILE with such a text"
        )
    return text


def _fill_template(template: str, prompt: str | Messages) -> str | Messages:
    """Put a prompt of plain text, or the last message of a chat, into the template."""
    if isinstance(prompt, str):
        return template.replace(PLACEHOLDER, prompt)
    last = prompt[-1] | {"content": template.replace(PLACEHOLDER, prompt[-1]["content"])}
    return (*prompt[:-1], last)


def _add_system_message(text: str, prompt: Messages) -> Messages:
    """Put the message in front, or in the place of the chat's own."""
    rest = prompt[1:] if prompt[0]["role"] == "system" else prompt
    return ({"role": "system", "content": text}, *rest)
