"""JSON files of a checkpoint: objects, or an error of one line."""

import json
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, named_file

# Longest value that an error message repeats, in characters.
MAX_QUOTED = 80


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` if there is none, or no such file."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    if not isinstance(contents, dict):
        raise UserError(f"{path} must hold a JSON object, it holds {quote_value(contents)}")
    return contents


def quote_value(value: Any) -> str:
    """Return a value for an error message: in one line and not too long."""
    text = repr(value)
    if len(text) > MAX_QUOTED:
        return text[: MAX_QUOTED - 3] + "..."
    return text


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file."""
    with named_file(path):
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
