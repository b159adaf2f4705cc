"""Generated openings of stories, for a model of TinyStories. Training and held-out ones are disjoint by their names.

Each has two sentences that go on with it: a joyful one, which is preferred, and a sad one.
"""

import numpy as np

from jax_ppo.types import Example

SPLITS = ("train", "heldout")

GIRLS = (
    "Lily",
    "Mia",
    "Anna",
    "Sue",
    "Lucy",
    "Emma",
    "Sara",
    "Amy",
    "Jane",
    "Ella",
    "Molly",
    "Daisy",
    "Mary",
    "Lola",
    "Kate",
    "Nina",
)
BOYS = (
    "Tim",
    "Tom",
    "Ben",
    "Max",
    "Sam",
    "Jack",
    "Bob",
    "Billy",
    "Timmy",
    "Joe",
    "Fred",
    "Leo",
    "Mark",
    "Dan",
    "Peter",
    "Jim",
)
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
_GOING_ON = (
    " {name} {what} all day.",
    " In the morning {name} {what}.",
    " {name} saw a {animal} and {what}.",
    " Then {name} {what} with the {animal}.",
)
_JOYFUL = ("smiled", "laughed", "played", "was happy", "was glad", "was excited")
_SAD = ("cried", "was sad", "was angry", "was scared", "was lost", "was hurt")


def story_names(split: str) -> tuple[str, ...]:
    """The names that the openings of "train" or "heldout" use."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {SPLITS}")
    held_out = split == "heldout"
    return tuple(
        name
        for group in (GIRLS, BOYS)
        for i, name in enumerate(group)
        if (i % HELD_OUT == HELD_OUT - 1) == held_out
    )


def generate_story_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Openings 0 .. count - 1 of the seed, of data_source "stories" and without a ground truth."""
    usable, made = story_names(split), []
    for index in range(count):
        rng = _rng(seed, split, index)
        prompt, name = _opening(rng, usable)
        made.append(
            Example(
                prompt=prompt,
                data_source="stories",
                extra_info={"index": index, "split": split},
                response=_going_on(rng, name, _JOYFUL),
                rejected=_going_on(rng, name, _SAD),
            )
        )
    return made


def _rng(seed, split, index):
    return np.random.default_rng([_STREAM, seed, SPLITS.index(split), index])


def _one(rng, of):
    return of[rng.integers(len(of))]


def _opening(rng, usable):
    """The opening, and the name in it."""
    name = _one(rng, usable)
    human = "girl" if name in GIRLS else "boy"
    kind = human if rng.random() < 0.6 else _one(rng, ANIMALS)
    opening = _one(rng, _OPENINGS)
    return opening.format(
        name=name, kind=kind, adjective=_one(rng, _ADJECTIVES), place=_one(rng, _PLACES)
    ), name


def _going_on(rng, name, moods):
    return _one(rng, _GOING_ON).format(name=name, what=_one(rng, moods), animal=_one(rng, ANIMALS))
