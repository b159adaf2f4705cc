"""The slowest process of a run, and the time that counts."""

import types

import pytest

from jax_ppo.runtime import compat, stragglers


class Store:
    """The key-value store of the coordination service."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [item for item in self.values.items() if item[0].startswith(folder + "/")]


def test_the_newest_seconds_of_all_processes_reach_process_0(monkeypatch):
    store = Store()

    def exchange(process, seconds):
        state = types.SimpleNamespace(client=store, process_id=process)
        monkeypatch.setattr(compat, "distributed_state", lambda: state)
        return stragglers.exchange_own_seconds(seconds)

    assert exchange(0, 1.0) == {0: 1.0}
    assert exchange(11, 5.0) == {}
    exchange(2, 1.5)
    assert exchange(0, 2.0) == {0: 2.0, 2: 1.5, 11: 5.0}


@pytest.mark.parametrize(
    ("seconds", "straggler"),
    [({0: 1.0, 1: 3.0}, (1, 2.0)), ({0: 2.5, 1: 1.0, 2: 1.5}, (0, 1.0)), ({4: 1.0}, (4, 0.0))],
)
def test_the_slowest_is_compared_with_the_median(seconds, straggler):
    assert stragglers.find_straggler(seconds) == straggler


def test_nested_waits_count_once(monkeypatch):
    seconds = 5.0
    monkeypatch.setattr(stragglers, "time", types.SimpleNamespace(monotonic=lambda: seconds))
    stragglers.take_waited_seconds()
    with stragglers.waiting(), stragglers.waiting():
        seconds += 2
    assert stragglers.take_waited_seconds() == 2
    assert stragglers.take_waited_seconds() == 0
