"""A fast plain-torch CPU decoder for a Hugging Face Qwen2: fused weights, in-place cache."""

import torch
import torch.nn.functional as F


class Decoder:
    """Decoder that samples `response` tokens per prompt and ignores EOS.

    The caller discards the tokens after an EOS.

    Args:
      model: Qwen2ForCausalLM, float32.
      rows: Prompts per batch.
      prompt: Tokens per prompt.
      response: Tokens per response.
    """

    def __init__(self, model, rows: int, prompt: int, response: int):
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

    @torch.no_grad()
    def generate(self, prompts, choose):
        """Return tokens and their log-probs, [rows, response] each.

        `choose` maps logits [rows, vocabulary] to one token and its log-prob per row.
        """
        self._fuse()
        last = self._hidden(prompts, 0)[:, -1]
        chosen = [choose(self._logits(last))]
        for column in range(self.prompt, self.prompt + self.response - 1):
            last = self._hidden(chosen[-1][0][:, None], column)[:, 0]
            chosen.append(choose(self._logits(last)))
        return tuple(torch.stack(x, 1) for x in zip(*chosen, strict=True))

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

    def _attend(self, i, qkv, column):
        rows, tokens, _ = qkv.shape
        heads, shared = self.config.num_attention_heads, self.config.num_key_value_heads
        end = column + tokens
        qkv = qkv.view(rows, tokens, heads + 2 * shared, self.head_dim).transpose(1, 2)
        rotated = self._rotate(qkv[:, : heads + shared], self.cos[column:end], self.sin[column:end])
        q = rotated[:, :heads]
        self.keys[i][:, :, column:end], self.values[i][:, :, column:end] = (
            rotated[:, heads:],
            qkv[:, heads + shared :],
        )
        keys, values = self.keys[i][:, :, :end], self.values[i][:, :, :end]
        if tokens > 1:
            attended = F.scaled_dot_product_attention(
                q, keys, values, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:  # query heads that share a key head form the rows of one product
            q = q.reshape(rows, shared, heads // shared, self.head_dim) * self.head_dim**-0.5
            attended = (q @ keys.transpose(-1, -2)).softmax(-1) @ values
        return attended.reshape(rows, tokens, heads * self.head_dim)

    def _rotate(self, x, cos, sin):
        half = self.head_dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def sample(logits, temperature: float):
    """Draw one token per row; return it with its log-prob.

    Inverse transform sampling is cheaper than torch.multinomial.
    """
    probabilities = (logits / temperature).softmax(-1)
    sums = probabilities.cumsum(-1)
    tokens = torch.searchsorted(sums, torch.rand(len(logits), 1) * sums[:, -1:]).clamp_(
        max=logits.shape[-1] - 1
    )
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


def greedy(logits):
    return logits.argmax(-1), logits[:, 0]
