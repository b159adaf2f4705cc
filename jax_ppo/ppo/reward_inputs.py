"""The input of a reward model with another tokenizer: responses decoded, tokenized again, packed.

The host does this, each process for a part of the responses, while the mesh scores the rollout.
"""

import dataclasses
import logging
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Reward
from jax_ppo.data import model_inputs
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.prompt_batches import pad_token_rows
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.hf.peft import holds_critic
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.training import packing
from jax_ppo.types import Example, PackedRows, Sequences

log = logging.getLogger(__name__)

ModelInputs = tuple[Sequences, PackedRows]  # arguments of `reward_model_scores`


class LocalResponses(NamedTuple):
    """The responses of this process, b of all B."""

    indices: np.ndarray  # int [b], their rows among all samples
    examples: list[Example]  # the example of each response
    tokens: list[np.ndarray]  # int [length] each
    texts: list[str]  # the decoded responses
    # What the policy wrote of these, which rules read; a reward model reads the whole texts.
    policy_texts: list[str]
    thoughts: list[str]  # the marks of thoughts that their prompts have opened, "" without one


def load_reward_tokenizer(
    options: Reward, net: Transformer | Deberta, folder: Path, actor_tokenizer: Any, date: str
) -> tuple[Any, list[str]]:
    """Return the reward model's tokenizer, the actor's for a decoder without one; and notes."""
    notes = []
    if holds_critic(folder):
        notes.append(
            f"note: config.reward.model_path={options.model_path!r} is a classifier of tokens, as "
            "critics are exported: its score of a token is the return expected after it"
        )
    if tokenizer_lib.has_tokenizer(folder):
        tokenizer = tokenizer_lib.load_tokenizer(str(folder), "config.reward.model_path", date)
        return tokenizer, notes
    if isinstance(net, Deberta):
        raise UserError(
            f"config.reward.model_path={options.model_path!r}: {folder} has no tokenizer (none of "
            f"{', '.join(tokenizer_lib.TOKENIZER_FILES)}); copy the encoder's into it"
        )
    return actor_tokenizer, notes


def make_reward_inputs(
    options: Reward,
    mesh: Mesh,
    net: Transformer | Deberta,
    tokenizers: tuple[Any, Any],
    *,
    packed: bool,
    prompts_are_chats: bool = True,
) -> tuple["RewardInputs | None", list[str]]:
    """Return the maker of the reward model's input, or `None`, and lines for the user.

    It is `None` if the model reads the sampled tokens. `tokenizers` are the model's and the
    actor's. A decoder reads prompts that are text as text, even with a chat template. Raise
    `UserError` if the model cannot read its input in the form that the options ask for.
    """
    tokenizer, actor_tokenizer = tokenizers
    is_encoder = isinstance(net, Deberta)
    if is_encoder and options.score_position != "auto":
        raise UserError(
            f"config.reward.score_position={options.score_position!r}: is not read: this reward "
            "model is an encoder, whose score is that of its first token; leave it unset"
        )
    lines, inputs = [], None
    if (  # a model with the actor's tokenizer scores the rollout itself: no input is made
        options.model_input == "auto"
        and not isinstance(net, Deberta)
        and model_inputs.tokenizers_match(tokenizer, actor_tokenizer)
    ):
        for name in ("max_length", "micro_batch_size_per_device"):
            if getattr(options, name):
                raise UserError(
                    f"config.reward.{name}={getattr(options, name)}: is not read: this reward "
                    "model takes the sampled tokens as they are; leave it unset, or set "
                    "config.reward.model_input"
                )
        ends = (*net.architecture.eos_ids, tokenizer.eos_token_id)
    else:
        # The model reads the decoded texts, in the tokens of its tokenizer.
        reader = _make_reader(options, net, tokenizer, prompts_are_chats)
        meshes.validate_architecture(mesh, net.architecture, is_encoder=is_encoder)
        lines.append(
            f"the reward model reads prompt and response as {reader.form}, in at most "
            f"{reader.max_length} of its tokens"
        )
        ends = reader.ends
        inputs = RewardInputs(
            mesh=mesh,
            reader=reader,
            actor_tokenizer=actor_tokenizer,
            rows_per_device=options.micro_batch_size_per_device,
            packed=packed,
            # An encoder reads whole rows: context devices take different rows.
            row_parts=1 if is_encoder else meshes.row_parts(mesh),
        )
    if isinstance(net, Deberta) or options.score_position != "auto":
        return inputs, lines
    if net.architecture.pad_id in ends:
        lines.append(
            "the reward model's score is read at the token before the final EOS, which is also its "
            "pad token, as jax_ppo.reward_model and transformers do; for a model that was trained "
            "to score the EOS, set config.reward.score_position=last_token"
        )
    return inputs, lines


def _make_reader(
    options: Reward, net: Transformer | Deberta, tokenizer: Any, prompts_are_chats: bool
) -> model_inputs.RewardInputEncoder:
    is_encoder, architecture = isinstance(net, Deberta), net.architecture
    form = options.model_input  # the form says how prompt and response are joined
    if form == "auto":
        is_chat = tokenizer.chat_template and prompts_are_chats
        form = "pair" if is_encoder else "chat" if is_chat else "text"
    if isinstance(architecture, DebertaArchitecture):
        longest = architecture.max_position_embeddings  # no limit: distances have embeddings
    else:
        longest = rope.max_sequence_length(architecture)
    if not is_encoder and (options.max_length or 0) > longest:
        raise UserError(
            f"config.reward.max_length={options.max_length}: the reward model takes {longest} "
            "tokens at most (its config.json)"
        )
    # JAX raises no error for token ids past the embedding.
    if len(tokenizer) > architecture.vocab_size:
        raise UserError(
            f"config.reward.model_path={options.model_path!r}: the tokenizer there has "
            f"{len(tokenizer)} tokens, the model's embedding {architecture.vocab_size}; "
            "they do not belong together"
        )
    try:
        return model_inputs.RewardInputEncoder(
            tokenizer, form, options.max_length or longest, with_eos=not is_encoder
        )
    except ValueError as obstacle:
        raise UserError(
            f"config.reward.model_input={options.model_input!r}: the reward model cannot read "
            f"this as {form}: {obstacle}"
        ) from None


@dataclasses.dataclass(kw_only=True, eq=False)
class RewardInputs:
    """Makes the reward model's input from the responses of all processes."""

    mesh: Mesh
    # Turns prompts and responses into the reward model's tokens.
    reader: model_inputs.RewardInputEncoder
    actor_tokenizer: Any  # the tokenizer of the samples
    # Packed rows that a device scores at once; `None` chooses automatically.
    rows_per_device: int | None
    packed: bool  # whether several inputs share a row
    row_parts: int  # number of devices that a row is split over
    _warned: bool = False

    def validate_chats(self, examples: SequenceOf[Example]) -> None:
        """Raise `UserError` for the first chat whose roles the model's template does not render."""
        chats: dict[tuple[str, ...], Example] = {}
        for example in examples:
            if not isinstance(example.prompt, str):
                chats.setdefault(tuple(m["role"] for m in example.prompt), example)
        for example in chats.values():
            try:
                self.reader.encode([example.prompt], ["a"])
            except ValueError as error:
                raise UserError(
                    f"{example.describe_location(1)}: config.reward.model_path cannot score it: "
                    f"{error}; config.reward.model_input=text needs no template"
                ) from error

    def __call__(
        self, responses: LocalResponses, last_tokens: SequenceOf[int], total: int
    ) -> tuple[ModelInputs, list[bool]]:
        """Tokenize and pack the responses of this process, of all B = `total`.

        `last_tokens` are their prompts' last ones, by the actor's tokenizer. Return the model's
        input, on the mesh, and for each response whether its input was too long.
        """
        texts = responses.texts
        # Text follows the prompt directly, so white space at the seam must survive decoding.
        if self.reader.form == "text":
            texts = [
                tokenizer_lib.decode_continuation(
                    self.actor_tokenizer, int(last), response.tolist()
                )
                for last, response in zip(last_tokens, responses.tokens, strict=True)
            ]
        ids, was_cut = self.reader.encode([example.prompt for example in responses.examples], texts)
        if any(was_cut) and not self._warned:
            self._warned = True
            log.warning(
                "%d of %d inputs of the reward model are longer than the %d tokens that it reads "
                "(config.reward.max_length) and lose the start of their prompt. This is logged "
                "once; reward/model_inputs_cut keeps counting",
                sum(was_cut),
                len(ids),
                self.reader.max_length,
            )
        return self._pack(ids, responses.indices, total), was_cut

    def _pack(self, ids: list[list[int]], indices: np.ndarray, total: int) -> ModelInputs:
        mesh = self.mesh
        local_lengths = np.array([len(row) for row in ids], np.int32)
        # All processes pack all samples, and so need every length.
        lengths = placement.all_rows(mesh, indices, local_lengths, total)
        # Few widths, since each compiles the reward model once more.
        parts = self.row_parts
        width = packing.row_width(int(lengths.max()), parts)
        # Tokens stay with the process that made them; only lengths are exchanged.
        local_tokens = pad_token_rows(ids, width)
        shards = meshes.row_shards(mesh) // parts
        rows_at_once = packing.rows_per_micro_batch(
            self.rows_per_device, width // parts, total, shards
        )
        packed, counts = packing.pack_samples(
            lengths, np.arange(total)[None], rows_at_once, width, self.packed
        )
        # Everything counts as the prompt: the text no longer shows where the response begins.
        columns = {
            "prompt_lengths": lengths,
            "lengths": np.zeros_like(lengths),
            "truncated": np.zeros(total, bool),
            "action_mask": np.zeros((total, 1), bool),
        }
        sequences = Sequences(
            tokens=placement.from_local_rows(mesh, indices, local_tokens, total),
            **placement.place(columns, sharding.batch_rows(mesh, total)),
        )
        first_group = packing.split_columns(jax.tree.map(lambda x: x[0], packed), shards, parts)
        return sequences, (
            placement.place(first_group, sharding.rows(mesh, axis=1)),
            placement.place(counts[0], sharding.replicated(mesh)),
        )
