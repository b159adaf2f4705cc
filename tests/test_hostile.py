"""A short form of the harness of hostile inputs, tests/harness/hostile.py."""

from pathlib import Path

import pytest

from whole_run import run_python


@pytest.mark.exhaustive
def test_hostile_inputs_are_accepted_correctly_or_refused_in_one_line():
    script = Path(__file__).parent / "harness" / "hostile.py"
    output = run_python(script, "--inputs", "120", "--seed", "1").stdout
    assert "0 of 120 inputs failed" in output
