"""Generated openings of stories, for a model of TinyStories. Training and held-out ones are disjoint by their names."""

import numpy as np

from jax_ppo.types import Example

SPLITS = ("train", "heldout")

GIRLS = ("Lily", "Mia", "Anna", "Sue", "Lucy", "Emma", "Sara", "Amy", "Jane", "Ella", "Molly", "Daisy", "Mary",
         "Lola", "Kate", "Nina")
BOYS = ("Tim", "Tom", "Ben", "Max", "Sam", "Jack", "Bob", "Billy", "Timmy", "Joe", "Fred", "Leo", "Mark", "Dan",
        "Peter", "Jim")
ANIMALS = ("dog", "cat", "bunny", "bird", "bear", "mouse", "frog", "duck", "fish", "pig")
HELD_OUT = 4  # every fourth name

_STREAM = 303  # keeps these random numbers apart from those of other seeded things

_OPENINGS = (
    "Once upon a time, there was a {adjective} {kind} named {name}.",
    "Once upon a time, in a {place}, there lived a {adjective} {kind} named {name}.",
    "One day, a {adjective} {kind} named {name} went to the {place}.",
    "{name} was a {adjective} {kind}.",
)
_ADJECTIVES = ("little", "small", "young", "big", "nice")
_PLACES = ("park", "house", "forest", "garden", "farm", "town")


def names(split: str) -> tuple[str, ...]:
    """The names that the openings of "train" or "heldout" use."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {SPLITS}")
    held_out = split == "heldout"
    return tuple(name for group in (GIRLS, BOYS) for i, name in enumerate(group)
                 if (i % HELD_OUT == HELD_OUT - 1) == held_out)


def examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Openings 0 .. count - 1 of the seed, of data_source "stories" and without a ground truth."""
    usable = names(split)
    return [Example(prompt=_opening(_rng(seed, split, index), usable), data_source="stories",
                    extra_info={"index": index, "split": split}) for index in range(count)]


def _rng(seed, split, index):
    return np.random.default_rng([_STREAM, seed, SPLITS.index(split), index])


def _opening(rng, usable):
    def one(of):
        return of[rng.integers(len(of))]

    name = one(usable)
    human = "girl" if name in GIRLS else "boy"
    kind = human if rng.random() < 0.6 else one(ANIMALS)
    return one(_OPENINGS).format(name=name, kind=kind, adjective=one(_ADJECTIVES), place=one(_PLACES))
