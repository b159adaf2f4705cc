"""The reference page docs/options.md and the table of options in the terminal."""

import subprocess
import sys
from pathlib import Path

from jax_ppo.config import reference
from jax_ppo.config.schema import all_options

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_reference_page_is_current():
    """If not: `python -m jax_ppo.config --markdown > docs/options.md`."""
    assert PAGE.read_text() == reference.options_markdown()


def test_the_page_has_one_row_per_option_with_four_cells():
    rows = [row for row in reference.options_markdown().splitlines() if row.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [option.name for option in all_options()]
    assert all(row.replace(r"\|", "").count("|") == 5 for row in rows)


def test_a_row_states_every_fact():
    page = reference.options_markdown().splitlines()
    row = next(row for row in page if row.startswith("| `trainer.critic_warmup`"))
    assert "| `0` | int (steps), at least 0 |" in row
    assert "**Needs**: `algorithm.adv_estimator` is gae and `critic.shared_trunk` is off." in row
    assert row.endswith("Read by `train`. |")
    fixed = next(row for row in page if row.startswith("| `reward.normalize`"))
    assert "`none`, `running`, `reference`" in fixed and "**Fixed**" in fixed


def test_the_terminals_table_and_the_page_are_printed_by_one_command():
    for arguments, expected in (([], "actor.optim.lr  "), (["--markdown"], "| `actor.optim.lr` |")):
        command = [sys.executable, "-m", "jax_ppo.config", *arguments]
        assert expected in subprocess.run(command, capture_output=True, text=True).stdout
