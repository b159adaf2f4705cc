"""Prompts with responses that are given, not sampled: what supervised training and reward models learn from."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from jax_ppo.data import prompts as prompts_lib
from jax_ppo.data.tokenizer import encode_responses
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.types import Example, Sequences

log = logging.getLogger(__name__)

DEMONSTRATION_FIELDS, PREFERENCE_FIELDS = (
    ("response",),
    ("response", "rejected"),
)  # what an example must have: the fields of types.Example


@dataclasses.dataclass(frozen=True)
class ResponseDataset:
    """Examples' prompts and responses as token ids, row by row.

    Attributes:
      prompts: the prompts; PromptBatches over them deal out the rows of all that is here.
      responses: for each kind of response (DEMONSTRATION_FIELDS has one, PREFERENCE_FIELDS two) int32 [length] of each row, an EOS at its end,
        length 1..max_response_length.
      max_response_length: tokens.
    """

    prompts: prompts_lib.PromptDataset
    responses: tuple[Sequence[np.ndarray], ...]
    max_response_length: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest example: of each of its responses, with the prompt."""
        return max(
            len(responses) * len(prompt) + sum(map(len, responses))
            for prompt, *responses in zip(self.prompts.tokens, *self.responses, strict=True)
        )

    def sequences(self, rows: Sequence[int]) -> Sequences:
        """Prompt and response of these rows, of one kind of response after the other: a pair's two are len(rows) apart. Host
        arrays, always max_prompt_length + max_response_length wide."""
        prompts = [self.prompts.tokens[row] for row in rows] * len(self.responses)
        responses = [of_kind[row] for of_kind in self.responses for row in rows]
        tokens = np.zeros(
            (len(prompts), self.prompts.max_prompt_length + self.max_response_length), np.int32
        )
        for into, prompt, response in zip(tokens, prompts, responses, strict=True):
            into[: len(prompt) + len(response)] = np.concatenate([prompt, response])
        lengths = np.array([len(ids) for ids in responses], np.int32)
        return Sequences(
            tokens=tokens,
            prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
            lengths=lengths,
            truncated=np.zeros(len(prompts), bool),
            action_mask=np.arange(self.max_response_length) < lengths[:, None],
        )


def tokenize_responses(
    examples: Sequence[Example],
    tokenizer,
    kinds: tuple[str, ...],
    *,
    max_prompt_length: int,
    max_response_length: int,
    filter_overlong_prompts: bool = True,
    truncation: str = "error",
    chat_template: bool = True,
    name: str = "config.data.train_files",
) -> ResponseDataset:
    """Encodes every example; those with an empty response, or one longer than max_response_length, are dropped, and how many is
    logged.

    Args:
      examples: that `check` has let pass.
      kinds: DEMONSTRATION_FIELDS or PREFERENCE_FIELDS.
      Others as for prompts.tokenize_prompts.

    Raises:
      UserError: as prompts.tokenize_prompts, no response that can be learned from, or a tokenizer without an EOS.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no EOS token, which is what ends a response")
    there = [
        example for example in examples if all(getattr(example, kind).strip() for kind in kinds)
    ]
    if dropped := len(examples) - len(there):
        log.warning(
            "%s: dropped %d of %d examples, which have an empty response",
            name,
            dropped,
            len(examples),
        )
    if not there:
        raise UserError(
            f"{name}: all {len(examples)} examples have an empty response; give other data"
        )
    prompts = prompts_lib.tokenize_prompts(
        there,
        tokenizer,
        max_prompt_length=max_prompt_length,
        filter_overlong_prompts=filter_overlong_prompts,
        truncation=truncation,
        chat_template=chat_template,
        name=name,
    )
    responses = [
        [
            np.array(ids, np.int32)
            for ids in encode_responses(
                tokenizer, example.prompt, [getattr(example, kind) for kind in kinds], chat_template
            )
        ]
        for example in prompts.examples
    ]
    kept = [row for row, ids in enumerate(responses) if max(map(len, ids)) <= max_response_length]
    if not kept:
        raise UserError(
            f"{name}: no example is left of {len(prompts)}: all responses are longer than "
            f"config.data.max_response_length={max_response_length} tokens. Set it higher, or give other data"
        )
    if dropped := len(prompts) - len(kept):
        log.warning(
            "%s: dropped %d of %d examples, whose responses are longer than config.data.max_response_length=%d tokens",
            name,
            dropped,
            len(prompts),
            max_response_length,
        )
    prompts = dataclasses.replace(
        prompts,
        examples=tuple(prompts.examples[row] for row in kept),
        tokens=[prompts.tokens[row] for row in kept],
    )
    return ResponseDataset(
        prompts, tuple(zip(*(responses[row] for row in kept), strict=True)), max_response_length
    )


def validate_responses(
    examples: Sequence[Example], kinds: tuple[str, ...], name: str, response_key: str
) -> None:
    """Raises UserError for the first example that has not the responses that `kinds` names.

    `name`: the option that named the data; `response_key`: the option of that name.
    """
    for row, example in enumerate(examples, 1):
        missing = [kind for kind in kinds if getattr(example, kind) is None]
        if not missing:
            continue
        near = (
            did_you_mean(response_key, example.extra_info) if kinds == DEMONSTRATION_FIELDS else ""
        )
        raise UserError(
            f"{name}, example {row} (data_source {example.data_source!r}) has no {' and no '.join(missing)}. "
            + _GIVERS[kinds].format(response_key=response_key)
            + near
        )


_GIVERS = {
    DEMONSTRATION_FIELDS: "GSM8K's form gives it as `answer`, HH-RLHF's as `chosen`, verl's in the column, or the entry of "
    "extra_info, that config.supervised.response_key={response_key!r} names.",
    PREFERENCE_FIELDS: "HH-RLHF's form (chosen, rejected) and `stories:` give both.",
}
