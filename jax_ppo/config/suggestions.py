"""Suggestions for options that do not exist: another framework's, or misspelled ones."""

import difflib
from collections.abc import Iterable

from jax_ppo.config.peer_options import VERL_PREFIX, explain_peer_option
from jax_ppo.config.schema import options_by_name

# The similarity, 0..1, below which nothing is suggested.
_CUTOFF = 0.75
# The similarity of last parts below which an option of the same section is not suggested.
_PART_CUTOFF = 0.55
# How many options of a section, and how many of which the name is a part, are listed at most.
_MAX_LISTED = 12
_MAX_PARTS = 3
# The weight of an equal last part relative to the similarity of the whole name.
_SAME_LAST_PART = 0.1


def suggest_option(name: str) -> str:
    """Return a sentence that helps with an unknown option, written so without `config.`."""
    if (explanation := explain_peer_option(name)) is not None:
        return f"{explanation}."
    names = options_by_name()
    # Some of verl's options have the same name here, except for the section around the actor's.
    if name.startswith(VERL_PREFIX):
        name = name.removeprefix(VERL_PREFIX)
        if name in names:
            return f"verl's {name}: config.{name}."
    if any(option.startswith(f"{name}.") for option in names):
        return f"It is a section; its options are config.{name}.NAME."
    nearest = find_nearest(name, names)
    if not nearest:
        section = f"{name.rpartition('.')[0]}."
        siblings = [x.removeprefix(section) for x in names if x.startswith(section)]
        if 0 < len(siblings) <= _MAX_LISTED:
            return f"config.{section}* are {', '.join(siblings)}."
        return "`python -m jax_ppo config` lists all options."
    return f"Did you mean {' or '.join(f'config.{option}' for option in nearest)}?"


def find_nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known options that a misspelled name may mean, several without a section."""
    names, name = list(known), name.lower()
    section, _, last_part = name.rpartition(".")
    if not section:
        # The section is missing, and the last part may be misspelled.
        by_last_part: dict[str, list[str]] = {}
        for option in names:
            by_last_part.setdefault(option.rpartition(".")[2], []).append(option)
        matches = difflib.get_close_matches(name, by_last_part, n=1, cutoff=_CUTOFF)
        if matches:
            return by_last_part[matches[0]]

    begins, ends = f"{section}.{last_part}", f"_{last_part}"
    parts = [
        x for x in names if x.startswith(begins) or (x.startswith(section) and x.endswith(ends))
    ]
    if 0 < len(parts) <= _MAX_PARTS and last_part:
        return parts

    def similarity(option: str) -> float:
        ratio = difflib.SequenceMatcher(None, name, option).ratio()
        has_same_last_part = option.rpartition(".")[2] == last_part
        # A name that is deeper than an option belongs to another framework's section.
        is_deeper = name.count(".") > option.count(".")
        return ratio + _SAME_LAST_PART * (has_same_last_part and not is_deeper)

    best = max(names, key=similarity)
    best_section, _, best_part = best.rpartition(".")
    # An equal section says nothing about what is left of the name, unless that is short for it.
    letters = iter(best_part)
    is_guess = best_section == section and not all(letter in letters for letter in last_part)
    part_ratio = difflib.SequenceMatcher(None, last_part, best_part).ratio()
    if similarity(best) < _CUTOFF or (is_guess and part_ratio < _PART_CUTOFF):
        return []
    return [best]
