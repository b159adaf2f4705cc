r"""Row formats of data sets, and their conversion to examples.

GSM8K:   `question`, and `answer` that ends in `#### N`.
MATH:    `problem`, and `solution` that has the answer in `\boxed{}`, or a separate `answer`.
verl:    `data_source`, `prompt` (text, or a list of messages), `reward_model` {style,
         ground_truth} and optionally `extra_info`. A column `answer`, here or in extra_info, may be
         a response to imitate.
HH-RLHF: `chosen` and `rejected`, two transcripts "\n\nHuman: ...\n\nAssistant: ..." with the
         same beginning. They are plain text, even if the tokenizer has a chat template. The prompt
         ends with the last "\n\nAssistant:" that both share.
Others:  prompts alone, demonstrations and preferences; see open_rows.py.
"""

import os
import re
from typing import Any

import numpy as np

from jax_ppo.data import open_rows
from jax_ppo.data.columns import Columns, parse_ground_truth
from jax_ppo.data.messages import parse_prompt, quote_value, user_message
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.types import Example

FORMS = (
    "expected GSM8K's form (question, answer with `#### N`), verl's (data_source, {prompt}, "
    "reward_model with style and ground_truth, extra_info if any), HH-RLHF's (chosen, rejected), "
    "or a prompt as {prompt}, messages, instruction, problem or question"
)
GSM8K = "openai/gsm8k"
MATH = "DigitalLearningGmbH/MATH-lighteval"
HH_RLHF = "Anthropic/hh-rlhf"
ASSISTANT = "\n\nAssistant:"
_DEFAULT_RESPONSE_KEY = Columns().response

_GROUPED = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")

Row = dict[str, Any]


def parse_row(
    row: Row,
    location: str,
    columns: Columns | None = None,
    instruction: str = "",
) -> Example:
    """Convert one row to an example.

    Args:
      row: columns by name. If several formats match, verl takes precedence over GSM8K, GSM8K over
        HH-RLHF, and HH-RLHF over the others.
      location: place of the row in the data, for error messages.
      columns: names of columns that options set; `None`: the defaults.
      instruction: text added to the question in GSM8K's and MATH's format, after a space.

    Raises:
      UserError: the row has none of the formats, or a column has the wrong type.
    """
    columns = columns or Columns()
    prompt_key = columns.prompt
    # The most specific set of columns comes first.
    if {"data_source", prompt_key, "reward_model"} <= row.keys():
        return _parse_verl_row(row, location, prompt_key, columns.response)
    # If `data.ground_truth_key` names a column of the row, the answer is there instead.
    if {"question", "answer"} <= row.keys() and columns.ground_truth not in row:
        return _parse_gsm8k_row(row, location, instruction)
    if {"problem", "solution"} <= row.keys() and columns.ground_truth not in row:
        return _parse_math_row(row, location, instruction)
    is_transcript = isinstance(row.get("chosen"), str) and prompt_key not in row
    if {"chosen", "rejected"} <= row.keys() and is_transcript:
        return _parse_hh_rlhf_row(row, location)
    # verl's form without the prompt is a mistake, even if another column could be the prompt.
    lacks_prompt = {"data_source", "reward_model"} <= row.keys()
    if not lacks_prompt:
        example = open_rows.parse_open_row(row, location, columns)
        if example is not None:
            return example
    names = ", ".join(map(str, row)) or "(none)"
    message = f"{location}: found the columns {names}; {FORMS.format(prompt=prompt_key)}"
    # The option that names the prompt's column is probably wrong.
    if lacks_prompt:
        raise UserError(
            f"{message}. config.data.prompt_key={prompt_key!r} names none of them."
            f"{did_you_mean(prompt_key, row)}"
        )
    raise UserError(message)


def to_plain_python(value: Any) -> Any:
    """Convert a TFDS value to plain Python: bytes decoded as UTF-8, arrays as lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: to_plain_python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain_python(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_plain_python(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _parse_gsm8k_row(row: Row, location: str, instruction: str) -> Example:
    question = row["question"]
    answer = row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(
            f"{location}: question and answer must be text, got {type(question).__name__} and "
            f"{type(answer).__name__}"
        )
    # The last mark counts: a worked solution may contain it earlier. What follows is kept whole.
    gold_answer = answer.rpartition("####")[2].strip().rstrip(".") if "####" in answer else ""
    if not gold_answer:
        raise UserError(f"{location}: the answer has no `#### N` (it ends in {answer[-60:]!r})")
    if _GROUPED.fullmatch(gold_answer):
        gold_answer = gold_answer.replace(",", "")  # as verl writes it
    return Example(
        prompt=user_message(_add_instruction(question, instruction)),
        data_source=GSM8K,
        ground_truth=gold_answer,
        extra_info=dict(row),
        response=answer,
    )


def _parse_math_row(row: Row, location: str, instruction: str) -> Example:
    problem = row["problem"]
    solution = row["solution"]
    data_source = row.get("data_source") or MATH
    for name, value in (("problem", problem), ("solution", solution), ("data_source", data_source)):
        if not isinstance(value, str):
            raise UserError(f"{location}: {name} must be text, got {quote_value(value)}")
    ground_truth = row.get("answer")
    if not isinstance(ground_truth, str):
        # The rule extracts the boxed answer from the solution.
        ground_truth = solution
    return Example(
        prompt=user_message(_add_instruction(problem, instruction)),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=dict(row),
        response=solution,
    )


def _add_instruction(question: str, instruction: str) -> str:
    if not instruction:
        return question
    return f"{question} {instruction}"


def _parse_hh_rlhf_row(row: Row, location: str) -> Example:
    chosen = row["chosen"]
    rejected = row["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise UserError(
            f"{location}: chosen and rejected must be text, got {type(chosen).__name__} and "
            f"{type(rejected).__name__}"
        )
    # The answers may begin with the same words, so the prompt ends at the last shared turn.
    shared = os.path.commonprefix([chosen, rejected])
    last_turn = shared.rfind(ASSISTANT)
    if last_turn < 0:
        raise UserError(
            f"{location}: chosen and rejected do not begin with the same dialogue up to "
            f"{ASSISTANT!r}"
        )
    prompt_end = last_turn + len(ASSISTANT)
    return Example(
        prompt=chosen[:prompt_end],
        data_source=HH_RLHF,
        response=chosen[prompt_end:],
        rejected=rejected[prompt_end:],
    )


def _parse_verl_row(row: Row, location: str, prompt_key: str, response_key: str) -> Example:
    data_source = row["data_source"]
    reward_model = row["reward_model"]
    extra_info = row.get("extra_info")
    if not isinstance(reward_model, dict):
        raise UserError(
            f"{location}: reward_model must have style and ground_truth, got "
            f"{quote_value(reward_model)}"
        )
    if not isinstance(data_source, str):
        raise UserError(f"{location}: data_source must be text, got {quote_value(data_source)}")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise UserError(
            f"{location}: extra_info must contain named values, got {quote_value(extra_info)}"
        )
    return Example(
        prompt=parse_prompt(row[prompt_key], location, prompt_key),
        data_source=data_source,
        ground_truth=parse_ground_truth(reward_model.get("ground_truth")),
        extra_info=extra_info or {},
        response=_find_response(row, extra_info or {}, location, response_key),
    )


def _find_response(row: Row, extra_info: Row, location: str, response_key: str) -> str | None:
    """Return the response in a row of verl's format, or None if it has none."""
    response = row.get(response_key)
    if response is None:
        response = extra_info.get(response_key)
    if response is None or isinstance(response, str):
        return response
    # Data sets use the default name, `answer`, for other things; one that the user sets must match.
    if response_key == _DEFAULT_RESPONSE_KEY:
        return None
    raise UserError(
        f"{location}: config.supervised.response_key={response_key!r} must name text, got "
        f"{type(response).__name__}"
    )
