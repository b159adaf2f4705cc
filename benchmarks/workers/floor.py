"""Worker of ppo_step.py: the matrix products of a step and nothing else, the floor under every side. Arguments: its settings.

What no program can leave out: each token through the weights once a pass, the vocabulary where a response token is predicted,
attention from blocks of 32 queries to the keys up to them, twice as much again for gradients. No softmax, no norms, no
optimizer, no padding; a decoding step has as many rows as there are responses so long, and reads as many columns as there are.
By torch, whose library for products is the fastest here. Attention is told apart.
"""

import collections
import json
import sys
import time

import harness
import torch
import workload

torch.set_num_threads(harness.THREADS)


BLOCK = 32  # queries


def products(settings: dict) -> dict[str, collections.Counter]:
    """{phase: {(batch, rows, in, out): how often}}."""
    shape, samples = workload.config(), settings["samples"]
    hidden, wide, layers = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_hidden_layers"],
    )
    keys, lengths = shape["num_key_value_heads"] * 64, response_lengths(settings)
    weights = (
        [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, wide)] * 2 + [(wide, hidden)]
    )
    vocabulary = (hidden, shape["vocab_size"])

    def through(rows, predicted=0, gradient=False, times=1):
        found = collections.Counter()
        for m, (k, n), count in [
            *((rows, weight, layers) for weight in weights),
            (predicted, vocabulary, 1),
        ]:
            if m:
                found[1, m, k, n] += count * times
            if m and gradient:
                found[1, m, n, k] += count * times
                found[1, k, m, n] += count * times
        return found

    predicted = sum(lengths)
    tokens = samples * settings["prompt"] + predicted
    going_on = collections.Counter(
        sum(length > step for length in lengths) for step in range(max(lengths))
    )
    rollout = sum(
        (through(rows, rows, times=steps) for rows, steps in going_on.items()),
        through(samples * settings["prompt"]),
    )
    scored = 3 if settings["reward_model"] else 2
    return {
        "rollout": rollout,
        # The reference, and roles without a vocabulary: critic and reward model.
        "scoring": through(tokens, predicted) + through(tokens, times=scored - 1),
        "update": through(tokens, predicted, gradient=True) + through(tokens, gradient=True),
        "attention": attention(shape, settings["prompt"], lengths, forward=scored + 2, backward=2),
    }


def attention(
    shape: dict, prompt: int, lengths: list[int], forward: int, backward: int
) -> collections.Counter:
    """Of a rollout, and of so many passes over the whole sequences: in all layers, query heads that share a key together."""
    layers, kv_heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    group, found = shape["num_attention_heads"] // kv_heads, collections.Counter()
    for end in range(BLOCK, prompt + max(lengths) + BLOCK, BLOCK):
        queries = group * BLOCK
        sequences = kv_heads * sum(prompt + length > end - BLOCK for length in lengths)
        prefilled = kv_heads * len(lengths) if end <= prompt else 0
        for batch, passes, back in ((sequences, forward, backward), (prefilled, 1, 0)):
            if batch:
                found[batch, queries, 64, end] += layers * (
                    passes + back
                )  # scores; the gradient of the weights
                found[batch, queries, end, 64] += layers * (
                    passes + back
                )  # values; the gradient of queries
                found[batch, end, queries, 64] += layers * 2 * back  # gradients of keys and values
    for step in range(max(lengths)):
        batch = kv_heads * sum(length > step for length in lengths)
        found[batch, group, 64, prompt + step] += layers
        found[batch, group, prompt + step, 64] += layers
    return found


def response_lengths(settings: dict) -> list[int]:
    return (
        [settings["response"]] * settings["samples"]
        if settings["equal_lengths"]
        else workload.typical_lengths(settings["samples"], **workload.VERL)
    )


def operands(size):
    """The shapes of left, right and out."""
    batch, m, k, n = size
    return (batch, m, k), (batch, k, n), (batch, m, n)


def main(settings: dict):
    phases = products(settings)
    sizes = {size for counted in phases.values() for size in counted}
    # One room for all: thousands of sizes together would not fit, and what stays in a cache only lowers the floor.
    rooms = [
        torch.randn(max(b * m * n for b, m, n in shapes))
        for shapes in zip(*map(operands, sizes), strict=True)
    ]
    given = {
        size: [
            room[: b * m * n].view(b, m, n) if b > 1 else room[: m * n].view(m, n)
            for room, (b, m, n) in zip(rooms, operands(size), strict=True)
        ]
        for size in sizes
    }

    def turn():
        seconds = {}
        for phase, counted in phases.items():
            start = time.perf_counter()
            for size, times in counted.items():
                left, right, out = given[size]
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
