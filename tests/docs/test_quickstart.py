"""The notebook runs from its first cell to its last, and what it trains learns."""

import json
import os
import re
import subprocess
import sys

import pytest

import doc_pages

STEPS = "trainer__total_training_steps=12"
SHORTER = "trainer__total_training_steps=3"
NOTEBOOK = doc_pages.ROOT / "examples" / "quickstart.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_has_no_stored_output():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def test_options_in_the_notebook_are_valid():
    """Runs the cell that configures; the training itself is in the slow suite."""
    (cell,) = [text for text in code_cells() if "load_config(" in text]
    program = f"{cell}\nassert config.trainer.total_training_steps == 12"
    subprocess.run([sys.executable, "-c", program], cwd=doc_pages.ROOT, check=True)


@pytest.mark.exhaustive
def test_the_notebook_trains_and_samples(tmp_path):
    """Cells run in their order as one program.

    It trains for three steps: test_learning.py shows that the configuration learns.
    """
    program = tmp_path / "quickstart.py"
    cells = "\n".join(code_cells())
    assert cells.count(STEPS) == 1
    program.write_text(cells.replace(STEPS, SHORTER))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment["PYTHONPATH"] = str(doc_pages.ROOT)
    finished = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    before, after = re.search(r"accuracy: ([\d.]+) -> ([\d.]+)", finished.stdout).groups()
    assert float(before) < 0.5
    assert 0 <= float(after) <= 1
    assert finished.stdout.count("####") >= 1
