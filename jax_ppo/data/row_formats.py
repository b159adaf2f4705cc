"""The three forms of a row, and the example that each becomes.

GSM8K's form:   `question`, and `answer` that ends in `#### N`.
verl's form:    `data_source`, `prompt` (text, or a list of messages), `reward_model` {style, ground_truth}, and
`extra_info` if any, in which, or beside which, `answer` may be a response worth imitating.
HH-RLHF's form: `chosen` and `rejected`, two transcripts that begin alike: "\n\nHuman: ...\n\nAssistant: ...". They stay the
text that they are, whatever chat template a tokenizer has; the prompt ends with the last "\n\nAssistant:" that both have.
"""

import os
import re
from typing import Any

import numpy as np

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.types import Example

FORMS = (
    "expected GSM8K's form (question, answer with `#### N`), verl's (data_source, {prompt}, reward_model with "
    "style and ground_truth, extra_info if any) or HH-RLHF's (chosen, rejected)"
)
GSM8K, HH_RLHF = "openai/gsm8k", "Anthropic/hh-rlhf"
ASSISTANT = "\n\nAssistant:"

_GOLD = re.compile(r"####\s*(-?[0-9][0-9.,]*)")


def parse_row(
    row: dict[str, Any],
    where: str,
    prompt_key: str = "prompt",
    instruction: str = "",
    response_key: str = "answer",
) -> Example:
    """The example of one row.

    Args:
      row: columns by name, of one of the forms; of several the first of verl's, GSM8K's, HH-RLHF's counts.
      where: the place of the row, for the message of an error.
      prompt_key: column of the prompt in verl's form.
      instruction: added to the question in GSM8K's form, with a blank before it.
      response_key: column of the response in verl's form, or its name in extra_info.

    Raises:
      UserError: none of the forms, or a column of the wrong kind.
    """
    if {"data_source", prompt_key, "reward_model"} <= row.keys():
        return _from_verl(row, where, prompt_key, response_key)
    if {"question", "answer"} <= row.keys():
        return _from_gsm8k(row, where, instruction)
    if {"chosen", "rejected"} <= row.keys():
        return _from_hh_rlhf(row, where)
    found = f"{where}: found the columns {', '.join(map(str, row)) or '(none)'}; " + FORMS.format(
        prompt=prompt_key
    )
    if {"data_source", "reward_model"} <= row.keys():
        raise UserError(
            f"{found}. config.data.prompt_key={prompt_key!r} names none of them."
            f"{did_you_mean(prompt_key, row)}"
        )
    raise UserError(found)


def to_plain_python(value: Any) -> Any:
    """A TFDS value as Python's own: bytes decoded as UTF-8, arrays as lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: to_plain_python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain_python(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_plain_python(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_gsm8k(row, where, instruction):
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(
            f"{where}: question and answer must be text, got {type(question).__name__} and "
            f"{type(answer).__name__}"
        )
    gold = _GOLD.findall(answer)
    if not gold:
        raise UserError(f"{where}: the answer has no `#### N` (it ends in {answer[-60:]!r})")
    content = f"{question} {instruction}" if instruction else question
    return Example(
        prompt=({"role": "user", "content": content},),
        data_source=GSM8K,
        ground_truth=gold[-1].replace(",", "").rstrip("."),
        extra_info=dict(row),
        response=answer,
    )


def _from_hh_rlhf(row, where):
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise UserError(
            f"{where}: chosen and rejected must be text, got {type(chosen).__name__} and "
            f"{type(rejected).__name__}"
        )
    shared = os.path.commonprefix([chosen, rejected])
    end = shared.rfind(ASSISTANT)
    if end < 0:
        raise UserError(
            f"{where}: chosen and rejected do not begin with the same dialogue up to {ASSISTANT!r}"
        )
    end += len(ASSISTANT)
    return Example(
        prompt=chosen[:end], data_source=HH_RLHF, response=chosen[end:], rejected=rejected[end:]
    )


def _from_verl(row, where, prompt_key, response_key):
    reward_model, extra_info = row["reward_model"], row.get("extra_info")
    if not isinstance(reward_model, dict):
        raise UserError(
            f"{where}: reward_model must hold style and ground_truth, got {reward_model!r}"
        )
    if not isinstance(row["data_source"], str):
        raise UserError(f"{where}: data_source must be text, got {row['data_source']!r}")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise UserError(f"{where}: extra_info must hold named values, got {extra_info!r}")
    response = row.get(response_key)
    if response is None:
        response = (extra_info or {}).get(response_key)
    if response is not None and not isinstance(response, str):
        if (
            response_key != "answer"
        ):  # a name that was given; of others' `answer` nobody has said that it is a response
            raise UserError(
                f"{where}: config.supervised.response_key={response_key!r} must name text, got "
                f"{type(response).__name__}"
            )
        response = None
    return Example(
        prompt=_prompt(row[prompt_key], where, prompt_key),
        data_source=row["data_source"],
        ground_truth=_ground_truth(reward_model.get("ground_truth")),
        extra_info=extra_info or {},
        response=response,
    )


def _ground_truth(value):
    """Text, with numbers written out. Lists and dicts stay: only a reward function of one's own can want them."""
    if value is None:
        return ""
    return value if isinstance(value, (str, list, dict)) else str(value)


def _prompt(value, where, prompt_key):
    if isinstance(value, str):
        return value
    if (
        isinstance(value, dict) and {"role", "content"} <= value.keys()
    ):  # TFDS keeps a list of messages by column
        value = [
            {"role": role, "content": content}
            for role, content in zip(value["role"], value["content"], strict=True)
        ]
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"{where}: {prompt_key} must be text or a list of messages, got {value!r}")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise UserError(
                f"{where}: each message of {prompt_key} must hold role and content as text, got "
                f"{message!r}"
            )
    return tuple(
        {key: item for key, item in message.items() if item is not None} for message in value
    )
