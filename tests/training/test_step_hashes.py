"""Hashes of a step's arrays: they tell any two apart, and not how devices split them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.runtime import placement, sharding
from jax_ppo.training import step_hashes
from jax_ppo.training.step_hashes import HashLog, find_difference, hash_quantities, read_hashes

DTYPES = ("float32", "bfloat16", "int32", "int8", "bool")


def texts(quantities):
    return step_hashes.take_hashes(jax.device_get(hash_quantities(quantities)))


def changed(values, place, bit):
    """Return a copy in which one bit differs."""
    raw = values.copy().view(np.uint8)
    raw.reshape(-1)[place] ^= bit
    return raw.view(values.dtype).reshape(values.shape)


def test_every_bit_and_place_counts_and_the_devices_do_not():
    r = np.random.default_rng(0)
    arrays = {
        f"weights/{dtype}": np.asarray(jnp.asarray(r.integers(0, 2, (16, 6)), dtype))
        for dtype in DTYPES
    }
    first = texts(arrays)
    assert len(set(first.values())) == len(DTYPES)
    for name, values in arrays.items():
        others = [changed(values, place, 1) for place in (0, 5, values.nbytes - 1)]
        others += [np.roll(values, 1), values[::-1].copy()]
        hashes = [texts(arrays | {name: other})[name] for other in (values, *others)]
        assert hashes[0] == first[name] and len(set(hashes)) == len(hashes), name
    # Equal sums of elements and of leaves are told apart, too.
    zeros = np.zeros(4, np.float32)
    assert texts({"values": (zeros, zeros + 1)}) != texts({"values": (zeros + 1, zeros)})
    mesh = tiny.make_mesh(8, data=2, fsdp=4)
    assert texts(placement.place(arrays, sharding.rows(mesh))) == first


def test_what_is_absent_is_left_out_and_the_rest_is_in_the_order_of_a_step():
    hashes = {name: jnp.ones(3) for name in ("weights/critic", "weights/actor", "tokens", "loss")}
    fetched = jax.device_get(hash_quantities(hashes | {"values": None})) | {"actor/loss": 1.0}
    named = step_hashes.take_hashes(fetched)
    assert list(named) == ["tokens", "loss", "weights/actor", "weights/critic"]
    assert list(fetched) == ["actor/loss"] and len(named["loss"]) == 16


def test_the_first_difference_is_found():
    hashes = {"tokens": "a", "values": "b", "weights/actor": "c"}
    assert find_difference(hashes, dict(hashes)) is None
    assert find_difference(hashes, hashes | {"weights/actor": "d", "values": "d"}) == "values"
    assert find_difference(hashes, {"tokens": "a", "weights/actor": "c"}) == "values"


@pytest.mark.parametrize("tail", ["", '{"step": 3, "has'])
def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path, tail):
    log = HashLog(tmp_path, 0)
    for step in (1, 2):
        log.write(step, "train", {"tokens": str(step)}, "f00d", {"jax": "0"})
    with (tmp_path / step_hashes.HASHES_FILE).open("a") as file:
        file.write(tail)  # of a line that a crash cut off
    assert list(read_hashes(tmp_path)) == [1, 2]
    HashLog(tmp_path, 1).write(2, "train", {"tokens": "again"}, "f00d", {"jax": "0"})
    assert [entry["hashes"]["tokens"] for entry in read_hashes(tmp_path).values()] == ["1", "again"]


@pytest.mark.parametrize("line", [b'{"step": 2, "hash', b"\xff", b"{}", b"[2]", b"null"])
def test_a_damaged_line_is_named(tmp_path, line):
    """Regression: a traceback of the JSON parser."""
    HashLog(tmp_path, 0).write(1, "train", {"tokens": "1"}, "f00d", {"jax": "0"})
    with (tmp_path / step_hashes.HASHES_FILE).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"hashes\.jsonl: line 2 does not hold"):
        read_hashes(tmp_path)
