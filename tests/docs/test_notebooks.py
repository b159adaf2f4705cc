"""The notebooks; those for Kaggle and Colab with a tiny model in the place of Qwen's."""

import ast
import json

import pytest

import doc_pages
import jax_ppo
from jax_ppo.config import validation
from whole_run import run_python

NOTEBOOKS = sorted((doc_pages.ROOT / "examples").glob("*.ipynb"))
TINY = """
from configs import arithmetic

def get_config():
    config = arithmetic.get_config()
    config.data.train_files = "arithmetic:64"
    config.data.val_files = "arithmetic:8:heldout"
    config.data.val_batch_size = 8
    config.data.train_batch_size = 64
    config.trainer.critic_warmup = 0
    config.trainer.val_before_train = False
    return config
"""


def code_cells(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def text(cell):
    return "".join(cell["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebooks:
    def test_it_has_no_stored_output(self, notebook):
        assert len(code_cells(notebook)) >= 5
        for cell in code_cells(notebook):
            assert not cell["outputs"] and cell["execution_count"] is None
            compile(text(cell), notebook.name, "exec")

    def test_its_options_are_valid(self, notebook):
        (cell,) = [cell for cell in code_cells(notebook) if "load_config(" in text(cell)]
        call = ast.parse(text(cell)).body[-1].value
        options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        config = jax_ppo.load_config(*map(ast.literal_eval, call.args), **options)
        validation.validate_config(config, "train")
        assert config.model.path in ("", "Qwen/Qwen2.5-0.5B-Instruct")

    @pytest.mark.exhaustive
    def test_it_trains_resumes_and_samples(self, notebook, tmp_path):
        """Cells run in their order as one program; the second time, the run is over already."""
        (tmp_path / "tiny.py").write_text(TINY)
        program = "\n".join(text(cell) for cell in code_cells(notebook))
        replacements = {
            '"gsm8k",': f'"{tmp_path}/tiny.py",',
            "steps=100": "steps=2",
            "steps=50": "steps=2",
            "steps=12": "steps=2",
            "save_freq=25": "save_freq=1",
            "save_freq=10": "save_freq=1",
            "/kaggle/": f"{tmp_path}/kaggle/",
            "/content/": f"{tmp_path}/content/",
            "[messages]": "[question]",  # the tiny model knows no chats
        }
        for old, new in replacements.items():
            program = program.replace(old, new)
        (tmp_path / "notebook.py").write_text(program)
        devices = 8 if "kaggle" in notebook.stem else 1  # eight chips, or one GPU
        place = {"cwd": tmp_path, "PYTHONPATH": str(doc_pages.ROOT)}
        first, second = (
            run_python("notebook.py", devices=devices, **place).stdout for _ in range(2)
        )
        assert "step 2: accuracy" in first and "step 2: accuracy" in second
        assert "step 2/2" in first and "step 2/2" not in second
