"""Prompts with responses: the data of supervised training and of reward models."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from jax_ppo.data.chat_templates import encode_responses, opened_thought
from jax_ppo.data.prompt_batches import pad_token_rows
from jax_ppo.data.tokenize_prompts import (
    PromptDataset,
    PromptEncoding,
    report_dropped,
    tokenize_prompts,
)
from jax_ppo.data.tokenizer import Tokenizer
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.thoughts import close_thought
from jax_ppo.types import Example, Sequences

log = logging.getLogger(__name__)

# The fields of types.Example that must be present, in the order of their use.
DEMONSTRATION_FIELDS = ("response",)
PREFERENCE_FIELDS = ("response", "rejected")


@dataclasses.dataclass(frozen=True)
class ResponseDataset:
    """Examples with the token ids of their prompts and responses."""

    prompts: PromptDataset  # `PromptBatches` of them select rows of the whole data set
    # For each field (one for demonstrations, two for preferences), int32 [length] per example; each
    # ends in an EOS, or as the chat template ends a turn, and has length 1..max_response_length.
    responses: tuple[Sequence[np.ndarray], ...]
    max_response_length: int  # tokens

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest example: all of its responses, each with the prompt."""
        return max(
            len(responses) * len(prompt) + sum(map(len, responses))
            for prompt, *responses in zip(self.prompts.tokens, *self.responses, strict=True)
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end responses."""
        return tuple(sorted({int(ids[-1]) for field in self.responses for ids in field}))

    def sequences(self, rows: Sequence[int]) -> Sequences:
        """Return prompts and responses of these rows as host arrays of the data set's full width.

        Responses of the first field come before those of the second: a pair is len(rows) apart.
        """
        prompts = [self.prompts.tokens[row] for row in rows] * len(self.responses)
        responses = [field[row] for field in self.responses for row in rows]
        width = self.prompts.max_prompt_length + self.max_response_length
        joined = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        lengths = np.array([len(ids) for ids in responses], np.int32)
        return Sequences(
            tokens=pad_token_rows(joined, width),
            prompt_lengths=np.array([len(ids) for ids in prompts], np.int32),
            lengths=lengths,
            truncated=np.zeros(len(prompts), bool),
            action_mask=np.arange(self.max_response_length) < lengths[:, None],
        )


def tokenize_responses(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    fields: tuple[str, ...],
    encoding: PromptEncoding,
    max_response_length: int,
    name: str = "config.data.train_files",
) -> ResponseDataset:
    """Encode every example that `validate_responses` has accepted for the same fields.

    Responses that are empty, equal to the other one of their pair or, with the EOS, longer than
    `max_response_length` tokens are dropped, and their number is logged. Raise `UserError` as
    `tokenize_prompts` does, if no example is usable, or a response cannot be encoded.
    """
    texts = [[getattr(example, field) for field in fields] for example in examples]
    usable = [
        example
        for example, given in zip(examples, texts, strict=True)
        if all(map(str.strip, given)) and len(set(given)) == len(fields)
    ]
    useless = "an empty response" + ", or two equal ones" * (len(fields) > 1)
    report_dropped(name, "example", len(examples), len(usable), f"which have {useless}")
    prompts = tokenize_prompts(usable, tokenizer, encoding, name)
    responses = _encode_fitting_responses(prompts, tokenizer, fields, encoding, max_response_length)
    longer = f"longer than config.data.max_response_length={max_response_length} tokens"
    total, left = len(prompts), len(responses)
    report_dropped(name, "example", total, left, f"whose responses are {longer}")
    return ResponseDataset(
        prompts=dataclasses.replace(
            prompts,
            examples=tuple(prompts.examples[row] for row in responses),
            tokens=[prompts.tokens[row] for row in responses],
        ),
        # From one list per example to one per field.
        responses=tuple(zip(*responses.values(), strict=True)),
        max_response_length=max_response_length,
    )


def _encode_fitting_responses(
    prompts: PromptDataset,
    tokenizer: Tokenizer,
    fields: tuple[str, ...],
    encoding: PromptEncoding,
    max_response_length: int,
) -> dict[int, list[np.ndarray]]:
    """Return the token ids of each field's response, by the rows whose responses all fit."""
    responses = {}
    closed = 0
    for row, example in enumerate(prompts.examples):
        mark = opened_thought(tokenizer, example.prompt, prompts.tokens[row])
        given = [getattr(example, field) for field in fields]
        texts = [close_thought(mark, text) for text in given]
        closed += texts != given
        try:
            encoded = encode_responses(
                tokenizer, example.prompt, texts, encoding.chat_template, example.tools
            )
        # A chat template raises errors of any kind.
        except Exception as error:
            place = example.describe_location(row + 1, prompts.name)
            raise UserError(f"{place}: the response cannot be encoded: {error}") from error
        # A pair is dropped unless both of its responses fit.
        if max(map(len, encoded)) <= max_response_length:
            responses[row] = [np.array(ids, np.int32) for ids in encoded]
    if closed:
        fact = "closed the thought that a prompt opens before the replies of"
        log.warning("%s: %s %d of %d examples", prompts.name, fact, closed, len(prompts))
    return responses


def validate_responses(
    examples: Sequence[Example], fields: tuple[str, ...], name: str, response_key: str
) -> None:
    """Raise `UserError` for the first example that lacks one of the fields."""
    for row, example in enumerate(examples, 1):
        missing = [field for field in fields if getattr(example, field) is None]
        if not missing:
            continue
        source = "Rows with chosen and rejected, and `stories:`, give both."
        if fields == DEMONSTRATION_FIELDS:
            source = (
                "It is read from chosen, a chat's last message, completion, response, output, "
                "solution or answer, or from the column, or the entry of extra_info, that "
                f"config.supervised.response_key={response_key!r} names."
                f"{did_you_mean(response_key, example.extra_info)}"
            )
        raise UserError(
            f"{example.describe_location(row, name)} (data_source {example.data_source!r}) has no "
            f"{' and no '.join(missing)}. {source}"
        )
