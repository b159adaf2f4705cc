"""The hand-written decoder with a compiled step. It ends with the longest response."""

import torch
import torch.nn.functional as F
from torch_decoder import Decoder

# Columns of the cache: a step reads whole blocks and is compiled once per number of blocks.
BLOCK = 64
CHECK_EVERY = 8  # steps between checks whether all rows have ended


class CompiledDecoder(Decoder):
    """Decoder at temperature 1 that stops when every row drew EOS or has `response` tokens.

    Arguments are those of Decoder, and `eos`.
    """

    def __init__(self, model, rows: int, prompt: int, response: int, eos: int):
        super().__init__(model, rows, prompt, response)
        self.eos = eos
        torch._dynamo.config.recompile_limit = 64
        self._compiled = torch.compile(self._step, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def generate(self, prompts):
        """Sample one response per prompt.

        Returns:
          Tokens, int64 [rows, T], where T is the longest response; log-probs, float32 [rows, T];
          lengths, [rows].
        """
        self._fuse()
        rows = len(prompts)
        tokens = torch.zeros(rows, self.response, dtype=torch.long)
        logprobs = torch.zeros(rows, self.response)
        tokens[:, 0], logprobs[:, 0] = draw(
            self._logits(self._hidden(prompts, 0)[:, -1]), torch.rand(rows, 1)
        )
        for t in range(1, self.response):
            if t % CHECK_EVERY == 0 and (tokens == self.eos).any(1).all():
                break
            column = self.prompt + t - 1
            end = min(-(-(column + 1) // BLOCK) * BLOCK, self.prompt + self.response)
            tokens[:, t], logprobs[:, t] = self._compiled(
                tokens[:, t - 1], torch.tensor([column]), torch.rand(rows, 1), end
            )
        ended = tokens == self.eos
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, self.response)
        longest = lengths.max()
        return tokens[:, :longest], logprobs[:, :longest], lengths

    def _step(self, tokens, column, uniforms, end: int):
        self._end = end  # for _attend
        return draw(self._logits(self._hidden(tokens[:, None], column)[:, 0]), uniforms)

    def _attend(self, i, qkv, column):
        if isinstance(column, int):
            return super()._attend(i, qkv, column)
        rows = len(qkv)
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = qkv.view(rows, heads + 2 * shared, 1, self.head_dim)
        rotated = self._rotate(qkv[:, : heads + shared], self.cos[column], self.sin[column])
        self.keys[i].index_copy_(2, column, rotated[:, heads:])
        self.values[i].index_copy_(2, column, qkv[:, heads + shared :])
        keys, values = self.keys[i][:, :, : self._end], self.values[i][:, :, : self._end]
        unwritten = torch.where(torch.arange(self._end) <= column, 0.0, -torch.inf)
        q = (
            rotated[:, :heads].reshape(rows, shared, heads // shared, self.head_dim)
            * self.head_dim**-0.5
        )
        return ((q @ keys.transpose(-1, -2) + unwritten).softmax(-1) @ values).reshape(
            rows, 1, heads * self.head_dim
        )


def draw(logits, uniforms):
    """Draw one token per row by inverse transform sampling; return it with its log-prob."""
    probabilities = F.softmax(logits, -1)
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, uniforms * sums[:, -1:]).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()
