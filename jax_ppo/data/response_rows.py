"""Rows of prompts with responses, each usable or refused by file and row number.

A row has its prompt and response as texts, in one of the forms of `row_formats`; or as the tokens
`prompt_ids` and `response_ids`, like the files that a run writes to `rollouts/`, where it may also
have `action_mask`, `turn_rewards` and `truncated`. Tokens are used as they are.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_ppo.data import files
from jax_ppo.data.tokenizer import ChatTemplate, encode_prompt, encode_responses
from jax_ppo.errors import UserError, shorten
from jax_ppo.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class ResponseRow:
    """A prompt with its response as tokens.

    Attributes:
      location: "FILE:LINE" or "FILE, row N", counted from 1.
      number: the row of the file, counted from 1.
      example: the prompt and what rules read.
      prompt_ids: int32 [length].
      response_ids: int32 [length], length at least 1.
      action_mask: bool [length], True on the tokens that the policy chose.
      truncated: whether the response was cut off.
      reward: the reward of the whole response in the file; `None` if it is not read.
      turn_rewards: float32 [length], rewards within the response; `None` without any.
    """

    location: str
    number: int
    example: Example
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    action_mask: np.ndarray
    truncated: bool
    reward: float | None
    turn_rewards: np.ndarray | None


class RefusedRow(NamedTuple):
    """A row that cannot be used: where it is, why not, and its text."""

    location: str
    reason: str
    row: str


@dataclasses.dataclass(frozen=True)
class ResponseReader:
    """Conversion of rows to tokens.

    Attributes:
      tokenizer: a transformers tokenizer.
      parse: returns the example of a row of texts, given the row and its location.
      chat_template: as `encode_prompt` takes it.
      vocab_size: number of the model's tokens.
      max_prompt_length: tokens of the longest prompt.
      max_response_length: tokens of the longest response, with its end.
      reward_key: column of the reward of the whole response; "" reads none.
      find_obstacle: returns why no rule can score an example; "" if one can.
    """

    tokenizer: "PreTrainedTokenizerBase"
    parse: Callable[[dict[str, Any], str], Example]
    chat_template: ChatTemplate
    vocab_size: int
    max_prompt_length: int
    max_response_length: int
    reward_key: str
    find_obstacle: Callable[[Example], str]

    def read(self, path: Path, option: str) -> Iterator[ResponseRow | RefusedRow]:
        """Yield each row of a file, in order.

        Raises:
          UserError: the file as a whole cannot be read.
        """
        for number, (location, raw) in enumerate(_read_raw_rows(path, option), start=1):
            try:
                row = raw if isinstance(raw, dict) else files.parse_jsonl_line(raw, location)
                yield self._convert(row, location, number)
            except UserError as error:
                reason = str(error).removeprefix(f"{location}: ")
                yield RefusedRow(location, reason, _row_text(raw))

    def _convert(self, row: dict[str, Any], location: str, number: int) -> ResponseRow:
        if {"prompt_ids", "response_ids"} <= row.keys():
            example = _sampled_example(row)
            prompt_ids = _token_ids(row, "prompt_ids", self.vocab_size)
            response_ids = _token_ids(row, "response_ids", self.vocab_size)
        else:
            example = self.parse(row, location)
            prompt_ids, response_ids = self._encode(example)
        for name, ids, longest in (
            ("prompt", prompt_ids, self.max_prompt_length),
            ("response", response_ids, self.max_response_length),
        ):
            if not len(ids):
                raise UserError(f"the {name} is empty")
            if len(ids) > longest:
                raise UserError(
                    f"the {name} has {len(ids)} tokens, and config.data.max_{name}_length={longest}"
                )
        if obstacle := self.find_obstacle(example):
            raise UserError(obstacle)
        length = len(response_ids)
        action_mask = _numbers(row, "action_mask", length)
        turn_rewards = _numbers(row, "turn_rewards", length)
        reward = None
        if self.reward_key:
            reward = _finite(row.get(self.reward_key), self.reward_key)
            if turn_rewards is not None:
                reward -= float(turn_rewards.sum())  # a logged score has both
        return ResponseRow(
            location=location,
            number=number,
            example=example,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            action_mask=np.ones(length, bool) if action_mask is None else action_mask != 0,
            truncated=bool(row.get("truncated")),
            reward=reward,
            turn_rewards=turn_rewards,
        )

    def _encode(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of prompt and response."""
        if example.response is None:
            raise UserError("has no response")
        if not example.response.strip():
            raise UserError("the response is empty")
        arguments = (self.tokenizer, example.prompt)
        try:
            prompt_ids = encode_prompt(*arguments, self.chat_template, example.tools)
            [ids] = encode_responses(
                *arguments, [example.response], self.chat_template, example.tools
            )
        # A chat template raises errors of any kind.
        except Exception as error:
            raise UserError(f"cannot be encoded: {error}") from error
        return np.array(prompt_ids, np.int32), np.array(ids, np.int32)


def _read_raw_rows(path: Path, option: str) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Yield the location of each row, and its line or its columns."""
    files.require_file(path, option)
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        yield from files.read_jsonl_lines(path)
    else:
        yield from files.read_rows(path, option)


def _row_text(raw: bytes | dict[str, Any]) -> str:
    if isinstance(raw, bytes):
        return raw.decode("utf-8", errors="replace").rstrip("\r\n")
    return json.dumps(raw, ensure_ascii=False, default=str)


def _sampled_example(row: dict[str, Any]) -> Example:
    """Return the example of a row that a run has logged."""
    for name in ("prompt", "data_source"):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f"{name} must be text, got {shorten(repr(row[name]))}")
    return Example(
        prompt=row.get("prompt", ""),
        data_source=row.get("data_source", ""),
        ground_truth=row.get("ground_truth") or "",
        extra_info=row,
    )


def _token_ids(row: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    ids = row[name]
    is_valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not is_valid:
        raise UserError(
            f"{name}: expected a list of the model's tokens, 0 to {vocab_size - 1}, got "
            f"{shorten(repr(ids))}"
        )
    return np.array(ids, np.int32)


def _numbers(row: dict[str, Any], name: str, length: int) -> np.ndarray | None:
    """Return the numbers of a response's tokens, float32; `None` if the row has none."""
    values = row.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != length:
        raise UserError(f"{name}: expected {length} numbers, one per token of the response")
    return np.array([_finite(value, name) for value in values], np.float32)


def _finite(value: Any, name: str) -> float:
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise UserError(f"{name}: expected a finite number, got {shorten(repr(value))}")
