"""Worker of ppo_step.py: the matrix products of a step and nothing else, the floor under every side. Arguments: its settings.

What no program can leave out: each token through the weights once a pass, the vocabulary where a response token is predicted,
twice as much again for gradients. No attention, no norms, no optimizer; every response the longest.
"""

import collections
import json
import sys
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import workload


def products(settings: dict) -> dict[str, collections.Counter]:
    """{phase: {(rows, in, out): how often}}."""
    shape, samples = workload.config(), settings["samples"]
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys, response = shape["num_key_value_heads"] * 64, settings["response"]
    weights = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]
    vocabulary = (hidden, shape["vocab_size"])

    def through(rows, predicted=0, gradient=False, times=1):
        found = collections.Counter()
        for m, (k, n), count in [*((rows, weight, layers) for weight in weights), (predicted, vocabulary, 1)]:
            if m:
                found[m, k, n] += count * times
            if m and gradient:
                found[m, n, k] += count * times
                found[k, m, n] += count * times
        return found

    tokens = samples * (settings["prompt"] + response)
    scored = 3 if settings["reward_model"] else 2
    return {"rollout": through(samples * settings["prompt"]) + through(samples, samples, times=response),
            # The reference, and roles without a vocabulary: critic and reward model.
            "scoring": through(tokens, samples * response) + through(tokens, times=scored - 1),
            "update": through(tokens, samples * response, gradient=True) + through(tokens, gradient=True)}


def main(settings: dict):
    phases, rng = products(settings), np.random.default_rng(0)

    @jax.jit
    def run(pair, other, times):
        """`times` products of `other` with one of a pair in turn: of a single one the compiler would form the product once."""

        def product(i, _):
            one = jax.lax.dynamic_index_in_dim(pair, i % 2, keepdims=False)
            return one @ other if one.shape[1] == other.shape[0] else other @ one

        return jax.lax.fori_loop(0, times, product, product(0, None))

    def operands(m, k, n):
        """The smaller one is the pair: it is copied each time, in at most a twentieth of the product's own time."""
        x, w = (jnp.array(rng.standard_normal(size), jnp.float32) for size in ((m, k), (k, n)))
        return (jnp.stack([x, x + 1]), w) if m < n else (jnp.stack([w, w + 1]), x)

    given = {size: operands(*size) for counted in phases.values() for size in counted}

    def turn():
        seconds = {}
        for phase, counted in phases.items():
            start = time.perf_counter()
            for size, times in counted.items():
                jax.block_until_ready(run(*given[size], times))
            seconds[phase] = time.perf_counter() - start
        flops = sum(2 * m * k * n * times for counted in phases.values() for (m, k, n), times in counted.items())
        return {"seconds": sum(seconds.values()), "phases": seconds, "tokens": settings["samples"] * settings["response"],
                "gflop": flops / 1e9}

    harness.serve(turn, ("jax", "jaxlib"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
