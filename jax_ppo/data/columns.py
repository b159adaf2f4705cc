"""The columns of data sets whose names are options."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of columns.

    Attributes:
      prompt: of the prompt, in rows of verl's form and in those of a prompt alone.
      response: of the response to imitate, or its name in extra_info of verl's form.
      ground_truth: of the reference answer, in rows of no other form.
    """

    prompt: str = "prompt"
    response: str = "answer"
    ground_truth: str = "ground_truth"


def parse_ground_truth(value: Any) -> Any:
    """Return text, with numbers converted to text.

    Lists and dicts are kept, for user-defined reward functions.
    """
    if value is None:
        return ""
    return value if isinstance(value, (str, list, dict)) else str(value)
