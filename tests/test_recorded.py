"""Stored values belong to the inputs that a test has, and stale ones are noticed."""

import json

import numpy as np
import pytest

import recorded


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Keep values in an empty folder; return a function that starts a session in a mode."""
    monkeypatch.setattr(recorded, "EXPECTED", tmp_path)
    monkeypatch.setattr(recorded, "LIBRARIES", ("numpy",))

    def start(mode):
        monkeypatch.setattr(recorded, "mode", mode)
        monkeypatch.setattr(recorded, "_files", {})
        monkeypatch.setattr(recorded, "_calls", recorded.Counter())

    return start


def store(start, computed, *inputs):
    start("write")
    recorded.value("x", lambda: computed, *inputs)
    recorded.write_files()


def test_a_value_is_read_as_it_was_computed(stored, tmp_path):
    bits = np.arange(11).reshape(1, 11) % 3 == 0
    value = {"x": np.float32([[1.5], [-2]]), "n": np.arange(-3, 3), "bits": bits, "y": [0.25, "z"]}
    store(stored, value, np.arange(3))
    stored(None)
    read = recorded.value("x", lambda: pytest.fail("it was computed"), np.arange(3))
    assert read.keys() == value.keys() and read["y"] == value["y"]
    for name in ("x", "n", "bits"):
        np.testing.assert_array_equal(read[name], value[name])
    [file] = tmp_path.iterdir()
    assert file.name == "recorded.json" and json.loads(file.read_text())["versions"].keys() == {
        "numpy"
    }


def test_a_value_of_other_inputs_is_refused(stored, tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    recorded.write_tensors(tmp_path, {"x": np.zeros(2, np.float32)})
    store(stored, 1.0, tmp_path, "name")
    for mode in (None, "check"):
        stored(mode)
        assert recorded.value("x", lambda: 1.0, tmp_path, "name") == 1.0
        with pytest.raises(pytest.fail.Exception, match="has no .*x 2"):
            recorded.value("x", lambda: 1.0, tmp_path, "name")
    recorded.write_tensors(tmp_path, {"x": np.float32([0, 1e-30])})
    stored(None)
    with pytest.raises(pytest.fail.Exception, match="was computed from other inputs"):
        recorded.value("x", lambda: 1.0, tmp_path, "name")


@pytest.mark.parametrize("live", [[1.0, 2.001], [1.0], [1.0, "x"]])
def test_a_value_that_is_not_computed_again_is_noticed(stored, live):
    store(stored, [1.0, 2.0])
    stored("check")
    assert recorded.value("x", lambda: [1.0, 2.00001]) == [1.0, 2.00001]
    stored("check")
    with pytest.raises((AssertionError, TypeError)):
        recorded.value("x", lambda: live)
