"""Data structures passed between modules, with shapes, units and ranges.

Shape letters: B samples (prompts x `rollout.n`), P prompt bucket, T response, S = P + T for the
longest prompt and response, R rows of a micro-batch, L tokens of a packed row, A micro-batches of a
mini-batch, U optimizer steps of a role on one rollout.
"""

import dataclasses
import typing
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt

Array = Any  # jax.Array or numpy.ndarray: the same contract holds on the host and on the mesh
Params = dict[str, Any]  # nested dicts of arrays: a role's parameters, or a tree of its structure

# Stands for NaN, "nothing to average", in programs' outputs: JAX_DEBUG_NANS would end the run.
NOTHING = float(np.finfo(np.float32).min)


def with_nan(values: np.ndarray) -> np.ndarray:
    """Return figures on the host, with NaN for `NOTHING`."""
    return np.where(values == np.float32(NOTHING), np.nan, values)


_Class = typing.TypeVar("_Class")


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: type[_Class]) -> type[_Class]:
    """Make a class a frozen dataclass that JAX treats as a tree of its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of a data set, on the host."""

    prompt: str | tuple[dict[str, str], ...]  # a text, or the {"role", "content"} of a chat
    data_source: str  # selects the rule that scores responses ("openai/gsm8k", "arithmetic", ...)
    ground_truth: str = ""  # the reference answer of the rule; "" if the rule needs none
    # Further columns of the row, passed to the reward function unchanged.
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    response: str | None = None  # a demonstration, or the preferred response of a pair
    rejected: str | None = None  # the other response of a pair
    source: int = 0  # which of the sources of `data.train_files` the row is from, counted from 0
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas that the chat template describes
    # "FILE:LINE" or "SOURCE, row N", for messages; "" of a row that was not read.
    location: str = dataclasses.field(default="", compare=False)

    def describe_location(self, number: int, origin: str = "") -> str:
        """Return where the row is: in its file, or which one of all rows of an origin."""
        return self.location or f"{origin}, example {number}".removeprefix(", ")


@pytree
class Prompts:
    """Tokenized prompts. Columns past a row's length are padding and are never read."""

    tokens: Int32[Array, "B P"]  # each prompt starts at column 0
    lengths: Int32[Array, " B"]  # number of tokens, 1..P
    # The row of the data that each prompt is from; `None` without an environment.
    rows: Int32[Array, " B"] | None = None


@pytree
class Rollout:
    """Sampled responses. Their lengths and masks are authoritative, never pad or EOS ids."""

    prompts: Prompts  # the prompts, each repeated n times; sample b answers row b
    # Row b holds its response in columns 0..lengths[b] - 1, including the EOS that ended it.
    responses: Int32[Array, "B T"]
    lengths: Int32[Array, " B"]  # number of response tokens, 1..T
    # Log-probability of each token under the distribution it was drawn from, before filters such as
    # top-p: log_softmax(logits / temperature). 0 past the length.
    logprobs: Float32[Array, "B T"]
    truncated: Bool[Array, " B"]  # True if T tokens ended neither by an EOS nor with a dialogue
    # True on the response tokens that the policy chose, not an environment. Models read all tokens;
    # losses, advantages and token metrics count only these.
    action_mask: Bool[Array, "B T"]
    # Tokens that the slots of each decoder queue could have drawn; `None` if not counted.
    slot_steps: Int32[Array, " queues"] | None = None
    # An environment's rewards, each at the last token of its turn, an action; `None` without one.
    turn_rewards: Float32[Array, "B T"] | None = None
    # True on the first token of each turn, an action: an empty observation leaves no other trace.
    turn_starts: Bool[Array, "B T"] | None = None
    # Figures of each dialogue by name; NaN where it has none.
    environment_metrics: dict[str, Float32[Array, " B"]] | None = None
    # The experts that each token of prompt and response, joined, passed through in each layer; the
    # number of experts for tokens that were not run. `None` unless the options request it.
    routed_experts: UInt[Array, "B S layers k"] | None = None
    # The step that began with the weights that drew each token; 0 past the length. `None` unless
    # responses continue under newer weights.
    versions: Int32[Array, "B T"] | None = None


@pytree
class Sequences:
    """Prompts and responses joined without a gap: the input of forward passes."""

    # Row b holds prompt_lengths[b] + lengths[b] tokens from column 0, then zeros.
    tokens: Int32[Array, "B S"]
    prompt_lengths: Int32[Array, " B"]  # number of prompt tokens, 1..S - 1
    lengths: Int32[Array, " B"]  # number of response tokens, 1..T
    truncated: Bool[Array, " B"]  # True if the response was cut off at its maximum length
    action_mask: Bool[Array, "B T"]  # as in `Rollout`; column t is the response's token t
    # As in `Rollout`; column i is the token at position i.
    routed_experts: UInt[Array, "B S layers k"] | None = None
    # As in `Rollout`; `None` if consecutive action tokens form a turn.
    turn_starts: Bool[Array, "B T"] | None = None


@pytree
class Packing:
    """The place of each sample's tokens in packed rows, and its segment id; [..., R, L]."""

    sample: Int32[Array, "*leading R L"]  # index into the batch of samples, -1 in empty places
    position: Int32[Array, "*leading R L"]  # position in that sample's sequence, 0 in empty places


# A packing [A, R, L], and how many of its A micro-batches hold tokens, int32 scalar.
PackedRows = tuple[Packing, Array]


@pytree
class MiniBatches:
    """The optimizer steps of a role on one rollout, in order: U = epochs x mini-batches."""

    packing: Packing  # [U, A, R, L]: of each mini-batch, A micro-batches of R rows
    counts: Int32[Array, " U"]  # number of the A micro-batches that are not empty
    members: Bool[Array, "U B"]  # the samples of each mini-batch


@pytree
class Control:
    """The values, apart from parameters, that carry over from one step to the next."""

    kl_coef: Float32[Array, ""]  # coefficient of the KL penalty in the coming step
    # Moments of "rewards" if scores are normalized, of "returns" if the critic's values are.
    moments: dict[str, Any]


@pytree
class Experience:
    """Everything that the update learns from; arrays of [B, T] are 0 outside `action_mask`."""

    sequences: Sequences  # the tokens
    sample_mask: Bool[Array, " B"]  # False for samples that are excluded from all losses
    # Log-probs of the policy at the start of the update, at the sampling temperature.
    old_logprobs: Float32[Array, "B T"]
    # Log-probs of the frozen reference at the same temperature; `None` without a reference.
    ref_logprobs: Float32[Array, "B T"] | None
    values: Float32[Array, "B T"] | None  # the critic's, before each token; `None` without one
    # The reward of each token, after shaping and with the penalties that are part of it.
    rewards: Float32[Array, "B T"]
    advantages: Float32[Array, "B T"]  # whitened if configured
    # Raw advantages + values, the critic's targets, normalized if its values are.
    returns: Float32[Array, "B T"] | None
    value_mask: Bool[Array, "B T"] | None  # tokens whose values the critic learns; `None`: actions
    # Weights of the policy loss for tokens that another policy sampled; `None`: all 1.
    importance: Float32[Array, "B T"] | None
    control: Control  # for the coming step

    @property
    def action_mask(self) -> Bool[Array, "B T"]:
        """Return the mask of the response tokens that the policy chose."""
        return self.sequences.action_mask
