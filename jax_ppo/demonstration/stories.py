"""Generated story openings for models of TinyStories, each with two continuations.

The joyful continuation is preferred over the sad one. Training and held-out openings have
different names.
"""

from collections.abc import Sequence

import numpy as np

from jax_ppo.types import Example

SPLITS = ("train", "heldout")

GIRLS = tuple(
    "Lily Mia Anna Sue Lucy Emma Sara Amy Jane Ella Molly Daisy Mary Lola Kate Nina".split()
)
BOYS = tuple("Tim Tom Ben Max Sam Jack Bob Billy Timmy Joe Fred Leo Mark Dan Peter Jim".split())
ANIMALS = ("dog", "cat", "bunny", "bird", "bear", "mouse", "frog", "duck", "fish", "pig")
HELD_OUT_EVERY = 4  # every fourth name is held out

_STREAM = 303  # first number of the seeds

_OPENINGS = (
    "Once upon a time, there was a {adjective} {kind} named {name}.",
    "Once upon a time, in a {place}, there lived a {adjective} {kind} named {name}.",
    "One day, a {adjective} {kind} named {name} went to the {place}.",
    "{name} was a {adjective} {kind}.",
)
_ADJECTIVES = ("little", "small", "young", "big", "nice")
_PLACES = ("park", "house", "forest", "garden", "farm", "town")
_CONTINUATIONS = (
    " {name} {mood} all day.",
    " In the morning {name} {mood}.",
    " {name} saw a {animal} and {mood}.",
    " Then {name} {mood} with the {animal}.",
)
_JOYFUL = ("smiled", "laughed", "played", "was happy", "was glad", "was excited")
_SAD = ("cried", "was sad", "was angry", "was scared", "was lost", "was hurt")


def story_names(split: str) -> tuple[str, ...]:
    """Return the names that the openings of "train" or "heldout" use."""
    # Within each group, so that both splits have girls and boys.
    return tuple(
        name
        for group in (GIRLS, BOYS)
        for number, name in enumerate(group, 1)
        if (number % HELD_OUT_EVERY == 0) == (split == "heldout")
    )


def generate_story_examples(count: int, split: str = "train", seed: int = 0) -> list[Example]:
    """Return openings 0 .. count - 1 of "train" or "heldout", of data_source "stories"."""
    names = story_names(split)
    examples = []
    for index in range(count):
        # Each example has a separate stream: example 5 is the same whatever the count.
        rng = np.random.default_rng([_STREAM, seed, SPLITS.index(split), index])
        prompt, name = _draw_opening(rng, names)
        example = Example(
            prompt=prompt,
            data_source="stories",
            extra_info={"index": index, "split": split},
            response=_draw_continuation(rng, name, _JOYFUL),
            rejected=_draw_continuation(rng, name, _SAD),
        )
        examples.append(example)
    return examples


def _draw_item(rng: np.random.Generator, items: Sequence[str]) -> str:
    return items[int(rng.integers(len(items)))]


def _draw_opening(rng: np.random.Generator, names: Sequence[str]) -> tuple[str, str]:
    name = _draw_item(rng, names)
    # Girls and boys have different names; an animal may have any name.
    if rng.random() >= 0.6:
        kind = _draw_item(rng, ANIMALS)
    elif name in GIRLS:
        kind = "girl"
    else:
        kind = "boy"
    template = _draw_item(rng, _OPENINGS)
    adjective = _draw_item(rng, _ADJECTIVES)
    place = _draw_item(rng, _PLACES)
    return template.format(name=name, kind=kind, adjective=adjective, place=place), name


def _draw_continuation(rng: np.random.Generator, name: str, moods: Sequence[str]) -> str:
    template = _draw_item(rng, _CONTINUATIONS)
    mood = _draw_item(rng, moods)
    return template.format(name=name, mood=mood, animal=_draw_item(rng, ANIMALS))
