"""Hashes of what a step computed, by which `jax_ppo.replay` compares two computations of it.

The mesh computes them from the bits of its arrays. A hash is a pair of sums modulo 2^32, which no
order of addition changes, so that it does not depend on how devices split an array. Arrays that
differ have the same hash once in 2^64 pairs; it is no protection against forged files.
"""

import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jax_ppo.errors import UserError
from jax_ppo.runtime import placement, sharding

HASHES_FILE = "hashes.jsonl"
PREFIX = "hashes/"  # of their names among the metrics of a step
# What is hashed, in the order in which a step computes it. A role's weights have its name added.
QUANTITIES = {
    "tokens": "prompts and responses",
    "sampled_logprobs": "log-probs of the sampler",
    "rewards": "score of each response",
    "old_logprobs": "log-probs of the policy before the update",
    "ref_logprobs": "log-probs of the reference",
    "values": "the critic's values",
    "advantages": "advantages",
    "returns": "the critic's targets",
    "control": "coefficient of the KL penalty, and moments of rewards and returns",
    "loss": "loss of a supervised step",
    "weights": "a trained role's weights after the step",
}


@jax.jit
def hash_quantities(quantities: dict[str, Any]) -> dict[str, UInt32[Array, "2"]]:
    """Return the hash of each tree of arrays, under `PREFIX` and its name.

    Names are in QUANTITIES, or weights/ROLE; a tree that is `None` is left out.
    """
    hashes = {}
    for name, tree in placement.to_device(quantities).items():
        leaves = jax.tree.leaves(tree)
        parts = [_hash_bits(leaf, seed) for seed, leaf in enumerate(leaves)]
        if parts:
            hashes[f"{PREFIX}{name}"] = functools.reduce(jnp.add, parts)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return hashes
    return jax.lax.with_sharding_constraint(hashes, sharding.replicated(mesh))


def take_hashes(fetched: dict[str, Any]) -> dict[str, str]:
    """Remove the hashes from the fetched metrics of a step, and return them as text, in order."""
    names = [name for name in fetched if name.startswith(PREFIX)]
    words = {name.removeprefix(PREFIX): fetched.pop(name) for name in names}
    order = list(QUANTITIES)
    return {
        name: "".join(f"{word:08x}" for word in np.asarray(words[name]).tolist())
        for name in sorted(words, key=lambda name: (order.index(name.partition("/")[0]), name))
    }


def _hash_bits(x: jax.Array, seed: int) -> UInt32[Array, "2"]:
    """Return two sums over the elements of a number that depends on bits and place."""
    words = _as_words(x)
    # Counted from the places in each dimension: to flatten a split array would gather it.
    index = jnp.full((), seed, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index * jnp.uint32(size) + place
    index = _mix(index + jnp.uint32((seed * 0x9E3779B9) % 2**32))
    # One reduction of pairs: two would each want the words and indices in memory.
    pairs = (_mix(words + index), _mix((words ^ index) * jnp.uint32(0x9E3779B1)))
    zeros = (jnp.uint32(0), jnp.uint32(0))
    axes = tuple(range(words.ndim))
    return jnp.stack(jax.lax.reduce(pairs, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), axes))


def _as_words(x: jax.Array) -> jax.Array:
    """Return the bits of each element as one uint32, or as several in a last axis."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize, 4)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Spread each bit over all of them (Appleby 2011, MurmurHash3, its last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


class HashLog:
    """Writer of hashes.jsonl: a line per step."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        """Open the file, and drop the lines of later steps, which are computed again."""
        self._path = folder / HASHES_FILE
        if self._path.exists():
            kept = [entry for step, entry in read_hashes(folder).items() if step <= steps_done]
            temporary = self._path.with_name(f"{HASHES_FILE}.tmp")
            temporary.write_text("".join(f"{json.dumps(entry)}\n" for entry in kept))
            os.replace(temporary, self._path)

    def write(
        self,
        step: int,
        command: str,
        hashes: dict[str, str],
        options: str,
        versions: dict[str, Any],
    ) -> None:
        """Append the hashes of a step, numbered from 1.

        `hashes` is the result of `take_hashes`, and `options` the result of `hash_options`;
        `versions` are the versions of software and devices.
        """
        entry = {
            "step": step,
            "command": command,
            "hashes": hashes,
            "options": options,
            "versions": versions,
        }
        with self._path.open("a") as file:
            file.write(f"{json.dumps(entry)}\n")


def read_hashes(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what `HashLog` wrote, by step; raise `UserError` for a damaged line.

    A last line that was cut off by a crash is skipped.
    """
    path = folder / HASHES_FILE
    if not path.exists():
        return {}
    entries = {}
    complete_lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    for number, line in enumerate(complete_lines, 1):
        try:
            entry = json.loads(line)
            entries[entry["step"]] = entry
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: line {number} does not hold the hashes of a step; remove the line"
            ) from None
    return entries


def hash_options(options: dict[str, Any]) -> str:
    """Return a hash of all options, which tells apart the steps of a run that changed one."""
    return f"{zlib.crc32(json.dumps(options, sort_keys=True).encode()):08x}"


def find_difference(recorded: dict[str, str], computed: dict[str, str]) -> str | None:
    """Return the first quantity whose hashes differ, in the order of QUANTITIES; else `None`."""
    # A quantity that only one of them has differs, too.
    names = [*computed, *(name for name in recorded if name not in computed)]
    return next((name for name in names if recorded.get(name) != computed.get(name)), None)
