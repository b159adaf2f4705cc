"""Constraints on the tokens that may be drawn: minimum length, forbidden strings, and biases.

They change what is drawn, not the log-probabilities that are recorded: those stay the policy's own,
like the log-probs of tokens drawn by top-k or top-p.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.sampler.engine import SamplingOptions


def constrains_logits(options: SamplingOptions) -> bool:
    """Return whether `constrain_logits` makes an array."""
    return bool(options.logit_bias or options.min_new_tokens or options.forbidden is not None)


def constrain_logits(
    options: SamplingOptions, vocab_size: int, drawn_B: jax.Array, forbidden_B: jax.Array
) -> jax.Array | None:
    """Return what to add to the logits before a draw, float32 [B, V]; `None` if unconstrained.

    Args:
      options: how to sample.
      vocab_size: V.
      drawn_B: int32, tokens of each response so far.
      forbidden_B: int32, the states of the search for forbidden strings.
    """
    added: list[jax.Array] = []
    if options.logit_bias:
        bias_V = np.zeros(vocab_size, np.float32)
        for token, bias in options.logit_bias:
            bias_V[token] += bias
        added.append(jnp.asarray(bias_V))
    if options.min_new_tokens:
        is_end_V = np.isin(np.arange(vocab_size), options.eos_ids)
        is_early_B = drawn_B < options.min_new_tokens
        added.append(jnp.where(is_early_B[:, None] & is_end_V, -jnp.inf, 0.0))
    if options.forbidden is not None:
        completes_BxV = options.forbidden.completing_tokens(forbidden_B)
        added.append(jnp.where(completes_BxV, -jnp.inf, 0.0))
    if not added:
        return None
    total = jnp.zeros((len(drawn_B), vocab_size))
    for term in added:
        total += term
    return total
