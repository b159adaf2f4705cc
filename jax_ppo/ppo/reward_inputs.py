"""From responses to what a reward model with a tokenizer of its own is run on: decoded, tokenised again, packed into rows.

The host does this, each process for its own responses, while the mesh scores the rollout.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.transformer import Transformer
from jax_ppo.rewards import model_inputs
from jax_ppo.runtime import sharding
from jax_ppo.training import packing
from jax_ppo.types import Example, Packing, Sequences

log = logging.getLogger(__name__)


def choose(
    config: Config,
    mesh,
    net: Transformer | Deberta,
    folder: Path,
    actors_tokenizer,
    report: Callable[[str], None],
    chats: bool = True,
) -> "RewardInputs | None":
    """How the reward model in `folder` gets to read responses; None where it takes the tokens as they were sampled.

    `chats`: whether prompts are messages; a decoder reads text as text, whatever chat template its tokenizer has.
    Raises UserError where it can not read what the options say.
    """
    options, encoder, tokenizer = config.reward, isinstance(net, Deberta), actors_tokenizer
    given, architecture = f"config.reward.model_path={options.model_path!r}", net.architecture
    if tokenizer_lib.has_tokenizer(folder):
        tokenizer = tokenizer_lib.load_tokenizer(str(folder), option="config.reward.model_path")
    elif encoder:
        raise UserError(
            f"{given}: {folder} has no tokenizer (none of {', '.join(tokenizer_lib.TOKENIZER_FILES)}); copy the "
            "encoder's into it"
        )
    if (
        options.model_input == "auto"
        and not encoder
        and model_inputs.tokenizers_match(tokenizer, actors_tokenizer)
    ):
        for name in ("max_length", "micro_batch_size_per_device"):
            if getattr(options, name):
                raise UserError(
                    f"config.reward.{name}={getattr(options, name)}: is not read: this reward model takes the "
                    "sampled tokens as they are; leave it unset, or set config.reward.model_input"
                )
        return None
    form = options.model_input
    if form == "auto":
        form = "pair" if encoder else "chat" if tokenizer.chat_template and chats else "text"
    most = (
        architecture.max_position_embeddings if encoder else rope.max_sequence_length(architecture)
    )
    if (options.max_length or 0) > most and not (encoder and not architecture.absolute_positions):
        raise UserError(
            f"config.reward.max_length={options.max_length}: the reward model takes {most} tokens at most (its "
            "config.json)"
        )
    if len(tokenizer) > architecture.vocab_size:
        raise UserError(
            f"{given}: the tokenizer there has {len(tokenizer)} tokens, the model's embedding "
            f"{architecture.vocab_size}; they do not belong together"
        )
    sharding.check_architecture(mesh, architecture, vocabulary=not encoder)
    try:
        reader = model_inputs.RewardInputEncoder(
            tokenizer, form, options.max_length or most, with_eos=not encoder
        )
    except ValueError as obstacle:
        raise UserError(
            f"config.reward.model_input={options.model_input!r}: the reward model can not read this as {form}: "
            f"{obstacle}"
        ) from None
    report(
        f"the reward model reads prompt and response as {form}, in tokens of its own, at most {reader.max_length}"
    )
    return RewardInputs(config, mesh, reader, actors_tokenizer)


class RewardInputs:
    """Callable: this process's responses, and those of the others, as scoring.reward_model_scores takes them.

    Attributes:
      reader: the reward model's.
    """

    def __init__(
        self, config: Config, mesh, reader: model_inputs.RewardInputEncoder, actors_tokenizer
    ):
        self.reader, self._config, self._mesh, self._actors_tokenizer = (
            reader,
            config,
            mesh,
            actors_tokenizer,
        )
        self._said = False

    def __call__(
        self,
        examples: Sequence[Example],
        last_tokens: Sequence[int],
        responses: Sequence[np.ndarray],
        texts: Sequence[str],
        indices: np.ndarray,
        total: int,
    ) -> tuple[tuple[Sequences, Packing, jax.Array], int]:
        """Tokenises and packs.

        Args:
          examples: of each response of this process.
          last_tokens: the last token of each one's prompt, the actor's.
          responses: the actor's tokens, int [length].
          texts: the responses decoded.
          indices: their rows among all samples.
          total: B.

        Returns:
          the samples, their packing and its count of micro-batches, on the mesh; and how many of this process were too long.
        """
        if self.reader.form == "text":
            texts = [
                tokenizer_lib.decode_continuation(
                    self._actors_tokenizer, int(last), response.tolist()
                )
                for last, response in zip(last_tokens, responses, strict=True)
            ]
        ids, cut = self.reader.encode([example.prompt for example in examples], texts)
        if cut and not self._said:
            self._said = True
            log.warning(
                "%d of %d inputs of the reward model are longer than the %d tokens that it reads (config.reward."
                "max_length) and lose the start of their prompt. This is said once; reward/model_inputs_cut counts on",
                cut,
                len(ids),
                self.reader.max_length,
            )
        return self._packed(ids, indices, total), cut

    def _packed(self, ids, indices, total):
        options, mesh = self._config.reward, self._mesh
        lengths = sharding.all_rows(
            mesh, indices, np.array([len(row) for row in ids], np.int32), total
        )
        width = packing.row_width(int(lengths.max()))
        tokens = np.zeros((len(ids), width), np.int32)
        for into, row in zip(tokens, ids, strict=True):
            into[: len(row)] = row
        at_once = packing.rows_at_once(
            options.micro_batch_size_per_device, width, total, sharding.row_shards(mesh)
        )
        packed, counts = packing.plan(
            lengths, np.arange(total)[None], at_once, width, self._config.packing.enabled
        )
        # All of it counts as the prompt: in the text nobody knows any more where the response begins.
        tokens = sharding.from_local_rows(mesh, indices, tokens, total)
        lengths, none, not_cut, no_actions = sharding.place(
            (lengths, np.zeros_like(lengths), np.zeros(total, bool), np.zeros((total, 1), bool)),
            sharding.rows(mesh),
        )
        return (
            Sequences(
                tokens=tokens,
                prompt_lengths=lengths,
                lengths=none,
                truncated=not_cut,
                action_mask=no_actions,
            ),
            sharding.place(jax.tree.map(lambda x: x[0], packed), sharding.rows(mesh, axis=1)),
            sharding.place(counts[0], sharding.replicated(mesh)),
        )
