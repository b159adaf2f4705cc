"""The memory that devices report."""

import types

import jax
import jax.numpy as jnp

from jax_ppo.runtime import compat
from jax_ppo.runtime.devices import measure_device_memory, release_freed_memory


def devices(*statistics):
    return lambda: [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in statistics]


def test_the_fullest_device_counts_and_a_platform_without_statistics_has_no_figures(monkeypatch):
    first = {"bytes_in_use": 2**30, "peak_bytes_in_use": 3 * 2**30, "num_allocs": 7}
    second = {"bytes_in_use": 2**31, "peak_bytes_in_use": 2**31}
    monkeypatch.setattr(jax, "local_devices", devices(first, second))
    assert measure_device_memory() == {"memory/used_gib": 2.0, "memory/peak_gib": 3.0}
    monkeypatch.setattr(jax, "local_devices", devices(None, None))
    assert measure_device_memory() == {}


def test_freed_memory_is_returned_where_the_arrays_that_stay_are_large(monkeypatch):
    calls = []
    monkeypatch.setattr(compat, "malloc_trim", lambda: calls.append)
    monkeypatch.setattr("jax_ppo.runtime.devices._LARGE", 4 * 100)
    release_freed_memory({"kernel": jnp.ones(99)})
    assert calls == []
    release_freed_memory({"kernel": jnp.ones(99), "scale": jnp.ones(1)})
    assert calls == [0]
