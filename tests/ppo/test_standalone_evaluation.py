"""What an evaluation by itself refuses. Its figures are compared with a run's in test_train.py."""

import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.ppo.standalone_evaluation import evaluate_model


def test_an_evaluation_needs_held_out_prompts(tmp_path):
    with pytest.raises(UserError, match="config.data.val_files=''"):
        evaluate_model(tiny.config(data__val_files=""), tmp_path)


def test_a_checkpoint_without_the_options_of_its_run_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot read the options of its run"):
        config = tiny.config(model__path=str(checkpoint), data__val_files="arithmetic:4:heldout")
        evaluate_model(config, tmp_path)
