"""Names of data set columns that options set."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of columns.

    Attributes:
      prompt: column of the prompt, in verl's form and in rows that consist of a prompt.
      response: column of the response to imitate, or its entry in extra_info of verl's form.
      ground_truth: column of the reference answer, in rows without a form of their own.
    """

    prompt: str = "prompt"
    response: str = "answer"
    ground_truth: str = "ground_truth"


def parse_ground_truth(value: Any) -> Any:
    """Return a reference answer as text; "" if there is none.

    Lists and dicts are returned unchanged, for user-defined reward functions.
    """
    if value is None:
        return ""
    if isinstance(value, (str, list, dict)):
        return value
    return str(value)
