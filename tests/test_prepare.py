"""`jax_ppo.prepare` writes Parquet in verl's form that our reader reads with the same contents."""

import gzip
import json

import pyarrow.parquet
import pytest

from jax_ppo import prepare
from jax_ppo.data import sources
from jax_ppo.rewards import math_rules
from real_data import DATA, needs

MATH = [
    {
        "problem": "What is $1/2 + 1/3$?",
        "solution": r"A common denominator: $\boxed{\frac{5}{6}}$.",
        "level": "Level 1",
        "type": "Prealgebra",
    },
    {"problem": "1+1?", "solution": r"\boxed{2}", "level": "Level 1", "type": "Algebra"},
]
ALPACA = [
    {"instruction": "Name a colour.", "input": "", "output": "Blue."},
    {"instruction": "Translate.", "input": "Haus", "output": "House"},
]
HH = [
    {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Name?\n\nAssistant: Claude.",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Name?\n\nAssistant: No.",
    }
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(tmp_path, name, source, *options):
    """Run the command; return the examples that the file it wrote holds."""
    out = tmp_path / "folder" / f"{name}.parquet"
    prepare.main(["prepare", name, f"--source={source}", f"--out={out}", *options])
    columns = pyarrow.parquet.read_schema(out).names
    assert columns == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert not list(out.parent.glob(".*"))
    return sources.read_examples(str(out))


@needs("gsm8k")
def test_real_gsm8k_keeps_prompts_and_ground_truths(tmp_path):
    source = f"{DATA}/gsm8k/test.jsonl"
    examples = prepared(tmp_path, "gsm8k", source, "--split=test")
    instruction = prepare.DATA_SETS["gsm8k"].instruction
    direct = sources.read_examples(source, instruction=instruction)
    assert len(examples) == len(direct) == 1319
    assert [e.prompt for e in examples] == [e.prompt for e in direct]
    assert [e.ground_truth for e in examples] == [e.ground_truth for e in direct]
    assert [e.response for e in examples] == [e.response for e in direct]
    assert {e.data_source for e in examples} == {"openai/gsm8k"}
    assert examples[7].extra_info["index"] == 7
    assert examples[7].extra_info["split"] == "test"


def test_math_gets_the_contents_of_the_box(tmp_path):
    source = write_jsonl(tmp_path / "math.jsonl", MATH)
    examples = prepared(tmp_path, "math", source, "--instruction=In a box.")
    direct = sources.read_examples(str(source), instruction="In a box.")
    assert [e.prompt for e in examples] == [e.prompt for e in direct]
    assert examples[0].prompt[0]["content"] == "What is $1/2 + 1/3$? In a box."
    assert [e.ground_truth for e in examples] == [r"\frac{5}{6}", "2"]
    assert [e.ground_truth for e in examples] == [
        math_rules.last_boxed(e.ground_truth) for e in direct
    ]
    assert examples[0].response == MATH[0]["solution"]
    assert examples[0].extra_info["level"] == "Level 1"


def test_transcripts_become_chats_with_both_responses(tmp_path):
    source = write_jsonl(tmp_path / "hh.jsonl", HH)
    (example,) = prepared(tmp_path, "hh_rlhf", source)
    assert example.prompt == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Name?"},
    )
    assert example.extra_info["answer"] == example.response == " Claude."
    assert example.extra_info["rejected"] == " No."


@needs("hh-rlhf")
def test_real_transcripts_keep_every_word(tmp_path):
    source = f"{DATA}/hh-rlhf/harmless-base-test.jsonl.gz"
    examples = prepared(tmp_path, "hh_rlhf", f"{source}[:200]")
    with gzip.open(source, "rt") as file:
        rows = [json.loads(line) for line in file][:200]
    for example, row in zip(examples, rows, strict=True):
        said = " ".join(message["content"] for message in example.prompt).split()
        transcript = row["chosen"].replace("\n\nHuman:", " ").replace("\n\nAssistant:", " ")
        assert [*said, *example.response.split()] == transcript.split()


def test_instructions_have_their_inputs(tmp_path):
    source = write_jsonl(tmp_path / "alpaca.jsonl", ALPACA)
    examples = prepared(tmp_path, "alpaca", source)
    direct = sources.read_examples(str(source))
    assert [e.prompt for e in examples] == [e.prompt for e in direct]
    assert [e.response for e in examples] == ["Blue.", "House"]
    assert {e.data_source for e in examples} == {"tatsu-lab/alpaca"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8", "--source=a.jsonl", "--out=a.parquet"], "gsm8: expected .* Did you mean 'gsm8k'"),
        (["gsm8k", "--source=a.jsonl", "--out=a.json"], "--out='a.json': .*parquet"),
        (["gsm8k", "--out=a.parquet"], "required: --source"),
        (["gsm8k", "--source=missing.jsonl", "--out=a.parquet"], "--source.*missing.jsonl"),
        (["alpaca", "--source=a.jsonl", "--out=a.parquet", "--instruction=x"], "cannot have one"),
        (["gsm8k", "--source=math.jsonl", "--out=a.parquet"], "row 1: not in gsm8k's form"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "math.jsonl", MATH)
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as error:
        prepare.main(["prepare", *arguments])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a.parquet").exists()
