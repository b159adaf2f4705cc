"""A hand-written, compiled CPU decoder for a Hugging Face Qwen2: fused weights, in-place cache."""

import torch
import torch.nn.functional as F

# Columns of the cache: a step reads whole blocks and is compiled once per number of blocks.
BLOCK = 64
CHECK_EVERY = 8  # steps between checks for finished responses
# Finished rows are dropped when they are at least this fraction of the batch. Dropping copies the
# cache, which takes about as long as one step.
DROP_FRACTION = 1 / 8
MIN_ROWS = 2  # torch compiles a batch of one row separately


class CompiledDecoder:
    """Decoder at temperature 1 that stops computing responses that have ended.

    Args:
      model: Qwen2ForCausalLM, float32.
      rows: Prompts per batch.
      prompt: Tokens per prompt.
      response: Maximum tokens per response.
      eos: Token that ends a response, or `None` if it is never drawn.
    """

    def __init__(self, model, rows: int, prompt: int, response: int, eos: int | None):
        c = self.config = model.config
        self.model, self.prompt, self.response = model, prompt, response
        self.head_dim = c.hidden_size // c.num_attention_heads
        length = prompt + response
        frequencies = c.rope_parameters["rope_theta"] ** -(
            torch.arange(0, self.head_dim, 2) / self.head_dim
        )
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.keys, self.values = (
            [
                torch.zeros(rows, c.num_key_value_heads, length, self.head_dim)
                for _ in range(c.num_hidden_layers)
            ]
            for _ in range(2)
        )
        self.rows, self.eos = rows, eos
        # Row-steps of the last call, also of finished rows.
        self.computed_row_steps = 0
        torch._dynamo.config.recompile_limit = 64
        self._prefill = torch.compile(self._draw_first, dynamic=False)
        self._full_step = torch.compile(self._step, dynamic=False, fullgraph=True)
        # Compiled for any number of rows.
        self._partial_step = torch.compile(self._partial, dynamic=False, fullgraph=True)
        if eos is not None:
            self._compile_all()

    @torch.no_grad()
    def generate(self, prompts):
        """Sample one response per prompt.

        Returns:
          Tokens, int64 [rows, T], where T is the longest response; log-probs, float32 [rows, T];
          lengths, [rows].
        """
        self._fuse()
        count = len(prompts)
        active = torch.arange(count)  # index into `prompts` of each row that is still computed
        tokens = torch.zeros(count, self.response, dtype=torch.long)
        logprobs = torch.zeros(count, self.response)
        current, current_logprobs = self._prefill(prompts, torch.rand(count, 1))
        tokens[:, 0], logprobs[:, 0] = current, current_logprobs
        self.computed_row_steps = count
        for t in range(1, self.response):
            column = self.prompt + t - 1
            if self.eos is not None and t % CHECK_EVERY == 0:
                left = self._rows_to_keep(tokens[active, :t])
                if not len(left):
                    break
                if len(left) < len(active):
                    active, current = active[left], current[left]
                    self._compact_cache(left, column)
            current, current_logprobs = self._advance(current, column)
            tokens[active, t], logprobs[active, t] = current, current_logprobs
            self.computed_row_steps += len(active)
        lengths = self._lengths(tokens)
        longest = lengths.max()
        return tokens[:, :longest], logprobs[:, :longest], lengths

    def _fuse(self):
        """Fuse each layer's projections of the same input, with their current weights."""
        self.layers = []
        for layer in self.model.model.layers:
            a, mlp = layer.self_attn, layer.mlp
            projections = (a.q_proj, a.k_proj, a.v_proj)
            self.layers.append(
                (
                    layer.input_layernorm.weight,
                    torch.cat([p.weight for p in projections]),
                    torch.cat([p.bias for p in projections]),
                    a.o_proj.weight,
                    layer.post_attention_layernorm.weight,
                    torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
                    mlp.down_proj.weight,
                )
            )

    def _norm(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _logits(self, x):
        return F.linear(self._norm(x, self.model.model.norm.weight), self.model.lm_head.weight)

    def _hidden(self, tokens, column):
        """Run tokens [rows, T], in columns from `column`, through all layers but the last norm."""
        x = self.model.model.embed_tokens.weight[tokens]
        for i, (norm, qkv, bias, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            x = x + F.linear(self._attend(i, F.linear(self._norm(x, norm), qkv, bias), column), out)
            gate, up = F.linear(self._norm(x, mlp_norm), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return x

    def _lengths(self, tokens):
        if self.eos is None:
            return torch.full((len(tokens),), self.response)
        ended = tokens == self.eos
        return torch.where(ended.any(1), ended.int().argmax(1) + 1, self.response)

    def _rows_to_keep(self, tokens):
        """Return the rows of the current batch to continue with; none if all have finished."""
        finished = (tokens == self.eos).any(1)
        finished_count = int(finished.sum())
        rows = torch.arange(len(tokens))
        if finished_count == len(tokens):
            return rows[:0]
        if finished_count < DROP_FRACTION * len(tokens):
            return rows
        # Add finished rows if fewer than MIN_ROWS are left.
        order = finished.int().argsort(stable=True)
        return order[: max(len(tokens) - finished_count, min(MIN_ROWS, len(tokens)))]

    def _compact_cache(self, left, columns: int):
        """Move the cache of the remaining rows to the first rows."""
        for cache in (*self.keys, *self.values):
            cache[: len(left), :, :columns] = cache[left, :, :columns]

    def _advance(self, current, column: int):
        """Draw the next token of each row; `current` was drawn last and is in `column`."""
        end = min(-(-(column + 1) // BLOCK) * BLOCK, self.prompt + self.response)
        uniforms = torch.rand(len(current), 1)
        if len(current) == self.rows:
            return self._full_step(current, torch.tensor([column]), uniforms, end)
        torch._dynamo.mark_dynamic(current, 0)
        torch._dynamo.mark_dynamic(uniforms, 0)
        return self._partial_step(current, torch.tensor([column]), uniforms, end)

    @torch.no_grad()
    def _compile_all(self):
        """Run every program once, so that nothing compiles during a turn."""
        self._fuse()
        self._prefill(
            torch.ones(self.rows, self.prompt, dtype=torch.long), torch.rand(self.rows, 1)
        )
        last = self.prompt + self.response - 1
        for column in sorted({min(c, last) for c in range(self.prompt, last + BLOCK, BLOCK)}):
            for rows in {self.rows, max(MIN_ROWS, self.rows - 1)}:
                self._advance(torch.ones(rows, dtype=torch.long), column)

    def _draw_first(self, prompts, uniforms):
        return draw(self._logits(self._hidden(prompts, 0)[:, -1]), uniforms)

    def _step(self, tokens, column, uniforms, end: int):
        self._end = end  # for _attend
        return draw(self._logits(self._hidden(tokens[:, None], column)[:, 0]), uniforms)

    def _partial(self, tokens, column, uniforms, end: int):
        """Do the same as _step. A separate function has a separate cache of compiled programs."""
        return self._step(tokens, column, uniforms, end)

    def _attend(self, i, qkv, column):
        rows, tokens, _ = qkv.shape
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = qkv.view(rows, tokens, heads + 2 * shared, self.head_dim).transpose(1, 2)
        at = slice(tokens) if isinstance(column, int) else column
        rotated = self._rotate(qkv[:, : heads + shared], self.cos[at], self.sin[at])
        q, k, v = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + shared :]
        if isinstance(column, int):  # whole prompts, from column 0
            self.keys[i][:, :, :tokens], self.values[i][:, :, :tokens] = k, v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2).reshape(rows, tokens, heads * self.head_dim)
        self.keys[i][:rows].index_copy_(2, column, k)
        self.values[i][:rows].index_copy_(2, column, v)
        keys = self.keys[i][:rows, :, : self._end]
        values = self.values[i][:rows, :, : self._end]
        unwritten = torch.where(torch.arange(self._end) <= column, 0.0, -torch.inf)
        # Query heads that share a key head form the rows of one product.
        q = q.reshape(rows, shared, heads // shared, self.head_dim) * self.head_dim**-0.5
        attended = (q @ keys.transpose(-1, -2) + unwritten).softmax(-1) @ values
        return attended.reshape(rows, 1, heads * self.head_dim)

    def _rotate(self, x, cos, sin):
        half = self.head_dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def draw(logits, uniforms):
    """Draw one token per row by inverse transform sampling; return it with its log-prob."""
    probabilities = F.softmax(logits, -1)
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, uniforms * sums[:, -1:]).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()
