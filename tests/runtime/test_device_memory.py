"""The memory that devices report."""

import types

import jax

from jax_ppo.runtime.device_memory import measure_device_memory


def devices(*statistics):
    return lambda: [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in statistics]


def test_the_fullest_device_counts(monkeypatch):
    first = {"bytes_in_use": 2**30, "peak_bytes_in_use": 3 * 2**30, "num_allocs": 7}
    second = {"bytes_in_use": 2**31, "peak_bytes_in_use": 2**31}
    monkeypatch.setattr(jax, "local_devices", devices(first, second))
    assert measure_device_memory() == {"memory/used_gib": 2.0, "memory/peak_gib": 3.0}


def test_a_platform_without_statistics_has_no_figures(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", devices(None, None))
    assert measure_device_memory() == {}
