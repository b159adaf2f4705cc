"""Worker of ppo_step.py: the matrix products of a step and nothing else, a floor under every side.

Arguments: the settings of ppo_step.py as JSON. No program can avoid these products:
each token through the weights once per pass, the vocabulary where a response token is predicted,
attention from blocks of 32 queries to the keys up to them, and twice as much again for gradients.
There is no softmax, norm, optimizer or padding; a decoding step has as many rows as responses of at
least that length, and reads only the used columns. Torch runs the products, as its library is the
fastest here. Attention is reported separately.
"""

import collections
import json
import sys
import time
from typing import Any

import harness
import torch
import workload

torch.set_num_threads(harness.THREADS)


BLOCK = 32  # queries


def count_products(settings: dict) -> dict[str, collections.Counter]:
    """Return {phase: {(batch, rows, in, out): number of products}}."""
    shape, samples = workload.config(), settings["samples"]
    hidden, mlp, layers = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_hidden_layers"],
    )
    keys, lengths = shape["num_key_value_heads"] * 64, response_lengths(settings)
    weights = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, mlp)] * 2 + [(mlp, hidden)]
    vocabulary = (hidden, shape["vocab_size"])

    def weight_products(rows, predicted=0, gradient=False, times=1):
        counts = collections.Counter()
        for m, (k, n), count in [
            *((rows, weight, layers) for weight in weights),
            (predicted, vocabulary, 1),
        ]:
            if m:
                counts[1, m, k, n] += count * times
            if m and gradient:
                counts[1, m, n, k] += count * times
                counts[1, k, m, n] += count * times
        return counts

    predicted = sum(lengths)
    tokens = samples * settings["prompt"] + predicted
    rows_per_step = collections.Counter(
        sum(length > step for length in lengths) for step in range(max(lengths))
    )
    rollout = sum(
        (weight_products(rows, rows, times=steps) for rows, steps in rows_per_step.items()),
        weight_products(samples * settings["prompt"]),
    )
    scored = 3 if settings["reward_model"] else 2
    return {
        "rollout": rollout,
        # The reference, and roles without a vocabulary: critic and reward model.
        "scoring": weight_products(tokens, predicted) + weight_products(tokens, times=scored - 1),
        "update": weight_products(tokens, predicted, gradient=True)
        + weight_products(tokens, gradient=True),
        "attention": count_attention_products(
            shape, settings["prompt"], lengths, forward=scored + 2, backward=2
        ),
    }


def count_attention_products(
    shape: dict, prompt: int, lengths: list[int], forward: int, backward: int
) -> collections.Counter:
    """Count attention's products in a rollout and in passes over the full sequences.

    All layers are counted; the query heads that share a key head form one product.
    """
    layers, kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    group, counts = shape["num_attention_heads"] // kv_heads, collections.Counter()
    for end in range(BLOCK, prompt + max(lengths) + BLOCK, BLOCK):
        queries = group * BLOCK
        sequences = kv_heads * sum(prompt + length > end - BLOCK for length in lengths)
        prefilled = kv_heads * len(lengths) if end <= prompt else 0
        for batch, passes, back in ((sequences, forward, backward), (prefilled, 1, 0)):
            if batch:
                counts[batch, queries, 64, end] += layers * (
                    passes + back
                )  # scores; the gradient of the weights
                counts[batch, queries, end, 64] += layers * (
                    passes + back
                )  # values; the gradient of queries
                counts[batch, end, queries, 64] += layers * 2 * back  # gradients of keys and values
    for step in range(max(lengths)):
        batch = kv_heads * sum(length > step for length in lengths)
        counts[batch, group, 64, prompt + step] += layers
        counts[batch, group, prompt + step, 64] += layers
    return counts


def response_lengths(settings: dict) -> list[int]:
    """Return the length of each response."""
    if settings["equal_lengths"]:
        return [settings["response"]] * settings["samples"]
    return workload.typical_lengths(
        settings["samples"], settings["mean_response"], settings["response"]
    )


def operands(size: tuple[int, int, int, int]) -> Any:
    """Return the shapes of the left and right operands and of the output."""
    batch, m, k, n = size
    return (batch, m, k), (batch, k, n), (batch, m, n)


def main(settings: dict) -> None:
    phases = count_products(settings)
    sizes = {size for counted in phases.values() for size in counted}
    # All sizes share their buffers: thousands of separate ones would not fit, and buffers that stay
    # in a cache only lower the floor.
    buffers = [
        torch.randn(max(b * m * n for b, m, n in shapes))
        for shapes in zip(*map(operands, sizes), strict=True)
    ]
    views = {
        size: [
            buffer[: b * m * n].view(b, m, n) if b > 1 else buffer[: m * n].view(m, n)
            for buffer, (b, m, n) in zip(buffers, operands(size), strict=True)
        ]
        for size in sizes
    }

    def turn() -> dict:
        seconds = {}
        for phase, counted in phases.items():
            start = time.perf_counter()
            for size, times in counted.items():
                left, right, out = views[size]
                multiply = torch.bmm if size[0] > 1 else torch.mm
                for _ in range(times):
                    multiply(left, right, out=out)
            seconds[phase] = time.perf_counter() - start
        flops = {
            phase: sum(2 * b * m * k * n * times for (b, m, k, n), times in counted.items()) / 1e9
            for phase, counted in phases.items()
        }
        return {
            "seconds": sum(seconds.values()),
            "phases": seconds,
            "tokens": sum(response_lengths(settings)),
            "gflop": flops,
        }

    harness.serve(turn, ("torch",))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
