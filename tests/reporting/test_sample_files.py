"""The files of sampled responses."""

import json

import pytest

from jax_ppo.errors import UserError
from jax_ppo.reporting.files import drop_samples_after, read_samples, write_samples


def test_samples_are_read_as_they_were_written_in_the_order_of_steps(tmp_path):
    write_samples(tmp_path, "training", 10, [{"response": "ü\n\x1b", "score": 1.5}])
    write_samples(tmp_path, "evaluation", 2, [{"score": 0.0}, {"score": 1.0}])
    assert list(read_samples(tmp_path)) == [
        ("evaluation", 2, [{"step": 2, "score": 0.0}, {"step": 2, "score": 1.0}]),
        ("training", 10, [{"step": 10, "response": "ü\n\x1b", "score": 1.5}]),
    ]


def test_a_number_that_json_does_not_have_is_null(tmp_path):
    write_samples(tmp_path, "training", 1, [{"kl": [float("nan"), float("inf"), 1.0]}])
    text = (tmp_path / "rollouts" / "training_000001.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "kl": [None, None, 1.0]}


def test_a_resumed_run_drops_what_it_computes_again(tmp_path):
    for step in (1, 5, 6):
        write_samples(tmp_path, "training", step, [{}])
    kept = {f"{name}.jsonl" for name in ("notes_2024", "training_good")}  # the user's
    for name in kept:
        (tmp_path / "rollouts" / name).touch()
    drop_samples_after(tmp_path, 5)
    assert [step for _, step, _ in read_samples(tmp_path)] == [1, 5]
    assert kept < {path.name for path in (tmp_path / "rollouts").iterdir()}


@pytest.mark.parametrize("content", [b"{}\n{\n", b"{}\n\xff\n"])
def test_a_damaged_file_is_named(tmp_path, content):
    write_samples(tmp_path, "training", 1, [{}])
    (tmp_path / "rollouts" / "training_000001.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="training_000001.jsonl:2: expected JSON: .*remove"):
        list(read_samples(tmp_path))
