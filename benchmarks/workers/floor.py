"""Worker of ppo_step.py: the matrix products of a step and nothing else, the floor under every side. Arguments: its settings.

What no program can leave out: each token through the weights once a pass, the vocabulary where a response token is predicted,
twice as much again for gradients. No attention, no norms, no optimizer, no padding; a decoding step has as many rows as there
are responses so long. By torch, whose library for products is the fastest here.
"""

import collections
import json
import sys
import time

import harness
import torch
import workload

torch.set_num_threads(harness.THREADS)


def products(settings: dict) -> dict[str, collections.Counter]:
    """{phase: {(rows, in, out): how often}}."""
    shape, samples = workload.config(), settings["samples"]
    hidden, wide, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys, lengths = shape["num_key_value_heads"] * 64, response_lengths(settings)
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

    predicted = sum(lengths)
    tokens = samples * settings["prompt"] + predicted
    going_on = collections.Counter(sum(length > step for length in lengths) for step in range(max(lengths)))
    rollout = sum((through(rows, rows, times=steps) for rows, steps in going_on.items()), through(samples * settings["prompt"]))
    scored = 3 if settings["reward_model"] else 2
    return {"rollout": rollout,
            # The reference, and roles without a vocabulary: critic and reward model.
            "scoring": through(tokens, predicted) + through(tokens, times=scored - 1),
            "update": through(tokens, predicted, gradient=True) + through(tokens, gradient=True)}


def response_lengths(settings: dict) -> list[int]:
    return [settings["response"]] * settings["samples"] if settings["equal_lengths"] else workload.typical_lengths(
        settings["samples"], **workload.VERL)


def main(settings: dict):
    phases = products(settings)
    sizes = {size for counted in phases.values() for size in counted}
    given = {(m, k, n): (torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for m, k, n in sizes}

    def turn():
        seconds = {}
        for phase, counted in phases.items():
            start = time.perf_counter()
            for size, times in counted.items():
                left, right, out = given[size]
                for _ in range(times):
                    torch.mm(left, right, out=out)
            seconds[phase] = time.perf_counter() - start
        flops = sum(2 * m * k * n * times for counted in phases.values() for (m, k, n), times in counted.items())
        return {"seconds": sum(seconds.values()), "phases": seconds, "tokens": sum(response_lengths(settings)),
                "gflop": flops / 1e9}

    harness.serve(turn, ("torch",))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
