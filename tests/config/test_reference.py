"""The reference page docs/options.md and the list of options in the terminal."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_ppo.__main__ import COMMANDS, main
from jax_ppo.config import command_line, reference
from jax_ppo.config.schema import all_options

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_reference_page_is_current():
    """If not: `python -m jax_ppo.config --markdown > docs/options.md`."""
    assert PAGE.read_text() == reference.options_markdown()


@pytest.mark.parametrize(
    ("command", "end"), [("train", "; a run resumes from a checkpoint in it"), ("score", "-scores")]
)
def test_help_names_the_folder_that_a_command_writes(command, end, capsys):
    with pytest.raises(SystemExit):
        command_line.read_command_line([command, "--help"], command)
    assert f"FOLDER defaults to output/EXPERIMENT_NAME{end}\n" in capsys.readouterr().out


def test_the_page_has_one_row_per_option_with_four_cells():
    rows = [row for row in reference.options_markdown().splitlines() if row.startswith("| `")]
    names = [row.split("`")[1] for row in rows]
    assert sorted(names) == sorted(option.name for option in all_options())
    assert all(row.replace(r"\|", "").count("|") == 5 for row in rows)


def test_markdown_keeps_every_character_of_a_meaning():
    for option in all_options():
        outside_code = re.sub("`[^`]*`", "", option.facts.doc)
        assert not re.search(r"[*<`]|\b_|_\b", outside_code), option.name


def test_the_terminals_list_and_the_page_are_printed_by_one_command():
    for arguments, expected in (
        ([], "actor.optim.lr = "),
        (["--markdown"], "| `actor.optim.lr` |"),
    ):
        command = [sys.executable, "-m", "jax_ppo.config", *arguments]
        assert expected in subprocess.run(command, capture_output=True, text=True).stdout


def test_the_terminals_list_has_unit_and_values_of_each_option_in_100_columns(capsys):
    reference.print_options()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(line.strip() for line in lines)
    for option in all_options():
        row = next(
            row for row in reference.options_markdown().splitlines() if f"| `{option.name}`" in row
        )
        values = row.replace(r"\|", "/").split(" | ")[2].replace("`", "")
        assert f"[{values}] {option.facts.doc}".replace("`", "") in text, option.name
    assert "data.train_batch_size = 64   [int (prompts), >= 1]" in lines


@pytest.mark.parametrize(
    ("command", "listed", "left_out"),
    [
        ("train", "actor.clip_ratio reward.function trainer.save_freq", "score.file"),
        (
            "critic",
            "critic.optim.lr score.file actor.ppo_epochs rollout.n",
            "actor.optim.lr actor.clip_ratio algorithm.rollout_is",
        ),
        (
            "evaluate",
            "reward.model_path rollout.val_kwargs.n data.val_files",
            "critic.path score.file actor.clip_ratio rollout.keep data.train_batch_size",
        ),
        (
            "score",
            "reference.path algorithm.lam rollout.temperature",
            "rollout.val_kwargs.n data.val_files trainer.logger critic.optim.lr",
        ),
        ("sft", "supervised.optim.lr trainer.save_freq", "trainer.export_critic reward.function"),
    ],
)
def test_a_command_lists_the_options_that_it_reads(command, listed, left_out, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    names = {line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines()}
    assert {*listed.split()} <= names and names.isdisjoint(left_out.split())


def test_the_helps_of_all_commands_fit_into_100_columns(capsys):
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):
            main([command, "--help"])
    main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
