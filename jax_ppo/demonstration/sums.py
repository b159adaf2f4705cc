"""Generated sums of two two-digit numbers, asked in a chat, for small pretrained models.

Training and held-out sums are disjoint: one pair of numbers in ten is held out.
"""

import zlib

import numpy as np

from jax_ppo.types import Example

_STREAM = 303  # a separate random stream, as in arithmetic.py


def generate_sum_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Return sums with their answers, of data_source "sums".

    Args:
      count: number of examples, drawn with replacement.
      split: "train" or "heldout".
      seed: ignored: the sums are always the same.
    """
    del seed
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if _is_held_out(a, b) == (split == "heldout")]
    draws = np.random.default_rng([_STREAM, split == "heldout"]).integers(len(pairs), size=count)
    examples = []
    for draw in draws:
        first, second = pairs[draw]
        example = Example(
            prompt=(
                {
                    "role": "user",
                    "content": f"What is {first} + {second}? Answer with the number only.",
                },
            ),
            data_source="sums",
            ground_truth=str(first + second),
        )
        examples.append(example)
    return examples


def _is_held_out(first: int, second: int) -> bool:
    return zlib.crc32(bytes((first, second))) % 10 == 0
