"""The contracts between the rooms: what one hands to the next, with shapes, units and ranges.

Shape letters: B samples (prompts x rollout.n), P prompt bucket, T response, S = the longest prompt + the longest response,
R rows of a micro-batch, L tokens of a packed row.
"""

import dataclasses
import typing
from typing import Any

import jax

Array = Any  # jax.Array or numpy.ndarray: the same contract holds on the host and on the mesh
Params = dict[str, Any]  # nested dicts of arrays: a role's parameters, or a tree of its structure


@typing.dataclass_transform(frozen_default=True)
def pytree(cls):
    """Make a class a frozen dataclass that JAX treats as a tree of its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of a data set, on the host.

    Attributes:
      prompt: the text, or a tuple of {"role", "content"} messages when it is a chat.
      data_source: names the rule that rewards it ("openai/gsm8k", "arithmetic", ...).
      ground_truth: what the rule compares with; "" where the rule needs nothing.
      extra_info: anything else that the row carried, handed to the reward function as it is.
      response: text worth imitating, or of two the one preferred; None where the row has none. PPO does not read it.
      rejected: text of the other one; None where there is none.
    """

    prompt: str | tuple[dict[str, str], ...]
    data_source: str
    ground_truth: str = ""
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    response: str | None = None
    rejected: str | None = None


@pytree
class Prompts:
    """Tokenised prompts. What stands after a row's length is padding and is never read.

    Attributes:
      tokens: int32 [B, P], each row from column 0 on.
      lengths: int32 [B], 1..P.
    """

    tokens: Array
    lengths: Array


@pytree
class Rollout:
    """What the sampler made. Lengths are the truth: no room looks for pad or EOS ids to find where a response ends.

    Attributes:
      prompts: the prompts, each repeated n times, sample b answering row b.
      responses: int32 [B, T]; row b holds its response in columns 0..lengths[b] - 1, an EOS that ended it included.
      lengths: int32 [B], 1..T.
      logprobs: float32 [B, T], log-probability of each token under the distribution it was drawn from before top-k and
        top-p: log_softmax(logits / temperature). 0 past the length.
      truncated: bool [B], True where T tokens came without an EOS.
      action_mask: bool [B, T], True on the response tokens that the policy chose, and False on those that came from elsewhere (the
        output of a tool, say) and past the length. Losses, advantages and metrics of tokens count the former alone; the models
        see all.
      slot_steps: int32, one a queue (a shard of rows has one, a small model on a CPU two): tokens that the decoder's slots had
        room for, used or not. None where there was no decoder.
    """

    prompts: Prompts
    responses: Array
    lengths: Array
    logprobs: Array
    truncated: Array
    action_mask: Array
    slot_steps: Array | None = None


@pytree
class Sequences:
    """Prompt and response joined without a gap: what the models score.

    Attributes:
      tokens: int32 [B, S]; row b holds prompt_lengths[b] + lengths[b] tokens from column 0 on, then zeros.
      prompt_lengths: int32 [B], 1..S - 1.
      lengths: int32 [B], tokens of the response, 1..T.
      truncated: bool [B], the response was cut off at its longest.
      action_mask: bool [B, T], as of Rollout: the response tokens that the policy chose.
    """

    tokens: Array
    prompt_lengths: Array
    lengths: Array
    truncated: Array
    action_mask: Array


@pytree
class Packing:
    """Which token of which sample stands where in the packed rows. Leading dimensions (epochs, ...) may come before.

    A row holds whole samples one after the other; `sample` is at the same time the segment that attention must not leave.

    Attributes:
      sample: int32 [..., R, L], index into the batch of samples, -1 where the row is empty.
      position: int32 [..., R, L], position in that sample's sequence, 0 where the row is empty.
    """

    sample: Array
    position: Array


@pytree
class MiniBatches:
    """The optimizer steps that a role takes on one rollout, in their order: U = epochs x mini-batches.

    Attributes:
      packing: [U, A, R, L], the rows of each, in A micro-batches of R.
      counts: int32 [U], how many of the A micro-batches hold something.
      members: bool [U, B], the samples of each.
    """

    packing: Packing
    counts: Array
    members: Array


@pytree
class Control:
    """What moves from step to step besides parameters.

    Attributes:
      kl_coef: float32 scalar, the coefficient of the KL to the reference in the coming step.
      moments: kernels.moments.Moments by what they are of: "rewards" where scores are normalised, "returns" where the critic
        learns normalised values.
    """

    kl_coef: Array
    moments: dict[str, Any]


@pytree
class Experience:
    """All that the update learns from: one entry for each response token, aligned with Rollout.responses.

    Attributes:
      sequences: the tokens.
      kept: bool [B], samples that teach something.
      old_logprobs: float32 [B, T], log-probs of the policy that the update starts from, at the sampling temperature.
      ref_logprobs: float32 [B, T], of the frozen reference at the same temperature; None without a reference.
      values: float32 [B, T], the critic's output for the state before each token; None without a critic.
      advantages: float32 [B, T], whitened if asked.
      returns: float32 [B, T], raw advantages + values: what the critic learns, normalised if it is; None without a critic.
      importance: float32 [B, T], weights of the policy loss for tokens that another policy sampled; None: all 1.
      control: for the coming step.
    Those of [B, T] are 0 where action_mask is False.
    """

    sequences: Sequences
    kept: Array
    old_logprobs: Array
    ref_logprobs: Array | None
    values: Array | None
    advantages: Array
    returns: Array | None
    importance: Array | None
    control: Control

    @property
    def action_mask(self) -> Array:
        """bool [B, T], the response tokens that the policy chose."""
        return self.sequences.action_mask
