"""A short form of the harness of hostile inputs, tests/harness/hostile.py."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_hostile_inputs_are_accepted_correctly_or_refused_in_one_line():
    script = Path(__file__).parent / "harness" / "hostile.py"
    command = [sys.executable, script, "--inputs", "120", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 of 120 inputs failed" in result.stdout
