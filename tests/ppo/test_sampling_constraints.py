"""A run whose responses end with a stop string, and constraints that it refuses."""

import pytest

import tiny
from jax_ppo.config.loading import load_config
from jax_ppo.errors import UserError
from jax_ppo.reporting.files import read_samples
from jax_ppo.run import ppo_training
from llama_folder import write_arithmetic_llama


@pytest.mark.exhaustive
def test_a_run_samples_under_its_constraints(tmp_path):
    # Digits are single tokens, letters mostly not.
    write_arithmetic_llama(tmp_path, problems=50)
    config = tiny.config(
        model__path=str(tmp_path / "llama"),
        data__train_files="arithmetic:32",
        data__val_files="arithmetic:8:heldout",
        data__max_prompt_length=48,
        data__max_response_length=16,
        rollout__n=2,
        rollout__stop='["4", "##"]',
        rollout__min_new_tokens=2,
        trainer__total_training_steps=1,
        trainer__log_rollouts=99,
        trainer__log_rollouts_freq=1,
        trainer__export=False,
    )
    ppo_training.train_ppo(config, tmp_path / "run")
    kinds = set()
    stopped = 0
    for kind, _, records in read_samples(tmp_path / "run"):
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
        ({"stop": ["a", ""]}, "'' in .* is empty or not text"),
        ({"stop": "[a"}, r"'\[a' is not a JSON list"),
        (
            {"val_kwargs.n": 8, "val_kwargs.temperature": 0.0},
            "val_kwargs.n=8: a temperature of 0 repeats one response",
        ),
        ({"min_new_tokens": 9999}, "must be at most config.data.max_response_length="),
    ],
)
def test_constraints_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        load_config("arithmetic", {f"rollout.{name}": value for name, value in options.items()})
