"""A run whose responses end with a stop string, and constraints that it refuses."""

import pytest

from jax_ppo.config import loading
from jax_ppo.errors import UserError
from jax_ppo.reporting.files import read_samples
from jax_ppo.run import ppo_training
from llama_folder import write_llama
from worked_solutions import generate_worked_solutions

OPTIONS = {
    "data.train_files": "arithmetic:32",
    "data.val_files": "arithmetic:8:heldout",
    "data.train_batch_size": 8,
    "actor.ppo_mini_batch_size": 8,
    "data.max_prompt_length": 48,
    "data.max_response_length": 16,
    "model.dtype": "float32",
    "rollout.n": 2,
    "trainer.total_training_steps": 1,
    "trainer.log_rollouts": 99,
    "trainer.log_rollouts_freq": 1,
    "trainer.compilation_cache": "off",
    "trainer.logger": "",
    "trainer.export": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    texts = [text for pair in generate_worked_solutions(50, 0.5, 0) for text in pair]
    write_llama(folder, texts, tokens=192)
    return str(folder / "llama")


def train(model, workdir, **options):
    changes = {"model.path": model} | {f"rollout.{name}": value for name, value in options.items()}
    return ppo_training.train_ppo(loading.load_config("arithmetic", OPTIONS | changes), workdir)


@pytest.mark.exhaustive
def test_a_run_samples_under_its_constraints(model, tmp_path):
    # Digits are single tokens, letters mostly not.
    train(model, tmp_path, stop=["4", "##"], min_new_tokens=2)
    kinds = set()
    stopped = 0
    for kind, _, records in read_samples(tmp_path):
        kinds.add(kind)
        for record in records:
            tokens = record["tokens"]
            assert len(tokens) >= 2
            # Stop strings are searched for behind the minimum.
            searched = "".join(tokens[2:])
            ends = "4" in searched or "##" in searched
            stopped += ends
            assert record["truncated"] is not (ends or tokens[-1] == "<eos>")
    assert kinds == {"training", "evaluation"} and stopped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "[1]"}, r"1 in '\[1\]' is empty or not text"),
        ({"stop": ["a", ""]}, "'' in .* is empty or not text"),
        ({"stop": "[a"}, r"'\[a' is not a JSON list"),
        ({"min_new_tokens": 17}, "must be at most config.data.max_response_length=16"),
    ],
)
def test_constraints_that_cannot_work_are_refused(model, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(model, tmp_path, **options)
