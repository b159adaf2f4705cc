"""A policy so small that all responses to one prompt can be listed: expectations are sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

EOS = 0


class Enumerated:
    """All N responses over a vocabulary of V that end with EOS, or are cut off after T tokens.

    A policy is a table theta [S, V] of logits, one row for each of the S prefixes after which a
    token is chosen. Every policy over these responses has this form, and a gradient has S V
    components to check.

    Attributes (NumPy arrays):
      tokens: int [N, T], the tokens; unspecified where mask is 0.
      states: int [N, T], the prefix that each token follows; unspecified where mask is 0.
      mask: [N, T].
      lengths: [N].
    """

    def __init__(self, vocabulary, longest):
        words = range(1, vocabulary)
        self.prefixes = [p for n in range(longest) for p in itertools.product(words, repeat=n)]
        responses = [(*p, EOS) for p in self.prefixes] + list(
            itertools.product(words, repeat=longest)
        )
        self.shape = len(self.prefixes), vocabulary
        self.tokens, self.states, self.mask = np.zeros((3, len(responses), longest), int)
        for i, response in enumerate(responses):
            for t, token in enumerate(response):
                self.tokens[i, t], self.states[i, t], self.mask[i, t] = (
                    token,
                    self.prefixes.index(response[:t]),
                    1,
                )
        self.lengths = self.mask.sum(1)

    def logprobs(self, theta):
        """Return the log-probs of all tokens [N, T], NaN where mask is 0."""
        return self.entries(jax.nn.log_softmax(theta))

    def entries(self, table):
        """Return [N, T]: each token's entry of a table [S] or [S, V], NaN where mask is 0."""
        return jnp.where(
            self.mask == 1,
            table[self.states, self.tokens] if table.ndim == 2 else table[self.states],
            jnp.nan,
        )

    def probabilities(self, theta):
        """Return the probability of each response [N]; they sum to 1."""
        return jnp.exp(
            jnp.where(self.mask == 1, jax.nn.log_softmax(theta)[self.states, self.tokens], 0).sum(1)
        )

    def visits(self, theta):
        """Return the probability that a response passes through each prefix [S]."""
        reached = np.zeros((len(self.prefixes), len(self.tokens)))
        for i, t in zip(*np.nonzero(self.mask), strict=True):
            reached[self.states[i, t], i] = 1
        return reached @ self.probabilities(theta)

    def expect(self, theta, x_N):
        return jnp.sum(self.probabilities(theta) * x_N)

    def expected_gradient(self, theta, loss, sampler=None):
        """Return the gradient of the expected sum over tokens of loss(theta) [N, T].

        The expectation is over responses of `sampler`, theta itself if None. The probabilities are
        constants, as they are when responses are sampled.
        """
        weights = self.probabilities(theta if sampler is None else sampler)[:, None]
        return jax.grad(lambda theta: jnp.sum(weights * loss(theta)))(theta)
