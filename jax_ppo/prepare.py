"""Prepare data: `python -m jax_ppo.prepare gsm8k --source FILE --out FILE.parquet`.

Writes rows in verl's form, which `config.data.train_files` and verl itself read: `data_source`,
`prompt` (messages), `ability`, `reward_model` {style, ground_truth} and `extra_info` with the row's
index, its other columns and its responses, as `answer` and `rejected`.
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from jax_ppo.data import sources
from jax_ppo.errors import UserError, did_you_mean, exit_on_user_error
from jax_ppo.rewards import math_rules
from jax_ppo.storage import paths
from jax_ppo.types import Example

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclasses.dataclass(frozen=True)
class DataSet:
    """The form in which the rows of a data set are written, in verl's columns."""

    data_source: str
    ability: str
    style: str  # "rule" or "model": what scores responses
    instruction: str = ""  # default text after each question
    # Whether the reader assigns `data_source` to rows in the data set's own form.
    is_named: bool = True


DATA_SETS = {
    "gsm8k": DataSet(
        data_source="openai/gsm8k",
        ability="math",
        style="rule",
        instruction='Let\'s think step by step and output the final answer after "####".',
    ),
    "math": DataSet(
        data_source="DigitalLearningGmbH/MATH-lighteval",
        ability="math",
        style="rule",
        instruction=r"Let's think step by step and output the final answer within \boxed{}.",
    ),
    "hh_rlhf": DataSet(data_source="Anthropic/hh-rlhf", ability="alignment", style="model"),
    "alpaca": DataSet(
        data_source="tatsu-lab/alpaca", ability="instruction", style="model", is_named=False
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"prepare: {message}")


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    with exit_on_user_error():
        options = read_prepare_arguments(arguments)
        examples = sources.read_examples(
            options.source, instruction=options.instruction, option="--source"
        )
        rows = convert_to_verl_rows(examples, options.data_set, options.split)
        write_parquet(rows, options.out)
    print(f"{options.out}: {len(rows)} rows")


def read_prepare_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line into `data_set`, `source`, `out` (a path), `split` and `instruction`.

    Raise `UserError` for wrong arguments, `SystemExit` after `--help`.
    """
    parser = _Parser(prog="python -m jax_ppo.prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data_set", help=", ".join(DATA_SETS))
    parser.add_argument(
        "--source",
        required=True,
        help="any value of config.data.train_files: files, hf:OWNER/NAME/FILE, tfds:NAME/SPLIT",
    )
    parser.add_argument("--out", required=True, help="the file to write, which ends in .parquet")
    parser.add_argument("--split", default="train", help="`split` in extra_info (default: train)")
    parser.add_argument(
        "--instruction", help="text after each question (default: verl's for gsm8k and math)"
    )
    options = parser.parse_args(arguments[1:])
    if options.data_set not in DATA_SETS:
        raise UserError(
            f"prepare {options.data_set}: expected one of {', '.join(DATA_SETS)}."
            f"{did_you_mean(options.data_set, DATA_SETS)}"
        )
    if options.instruction is None:
        options.instruction = DATA_SETS[options.data_set].instruction
    elif options.instruction and not DATA_SETS[options.data_set].instruction:
        raise UserError(f"--instruction: rows of {options.data_set} cannot have one")
    options.out = paths.expand_local_path(options.out, "--out")
    if options.out.suffix != ".parquet":
        raise UserError(f"--out={str(options.out)!r}: expected a file that ends in .parquet")
    return options


def convert_to_verl_rows(examples: list[Example], name: str, split: str) -> list[dict[str, Any]]:
    """Return the rows of a data set of DATA_SETS in verl's form; raise `UserError` for others."""
    data_set = DATA_SETS[name]
    rows = []
    for index, example in enumerate(examples):
        if example.data_source != (data_set.data_source if data_set.is_named else ""):
            raise UserError(
                f"--source, row {index + 1}: not in {name}'s form; its data_source is "
                f"{example.data_source!r}"
            )
        truth = example.ground_truth
        if name == "math":
            # verl's rule does not extract the boxed answer.
            boxed = math_rules.last_boxed(truth)
            truth = truth if boxed is None else boxed
        answers = {"answer": example.response, "rejected": example.rejected}
        extra_info = {**example.extra_info, "split": split, "index": index}
        rows.append(
            {
                "data_source": data_set.data_source,
                "prompt": to_messages(example.prompt),
                "ability": data_set.ability,
                "reward_model": {"style": data_set.style, "ground_truth": truth},
                "extra_info": extra_info
                | {key: text for key, text in answers.items() if text is not None},
            }
        )
    return rows


def to_messages(prompt: str | tuple[dict[str, str], ...]) -> list[dict[str, str]]:
    r"""Return a prompt as a chat; text must be a transcript "\n\nHuman: ...\n\nAssistant:"."""
    if not isinstance(prompt, str):
        return [dict(message) for message in prompt]
    _, *parts = _TURN.split(prompt)
    return [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
        # The turn of the response, which is last, is still empty.
        if text.strip()
    ]


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a Parquet file, which appears only when complete; raise `UserError` if that fails."""
    import pyarrow
    import pyarrow.parquet

    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)
        unfinished.replace(path)
    except (OSError, pyarrow.ArrowException) as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"--out={str(path)!r}: cannot be written: {error}") from error


if __name__ == "__main__":
    main(sys.argv)
