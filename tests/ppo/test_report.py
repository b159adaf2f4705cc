"""What a run reports about its steps, and when it stops. Whole runs are in test_train.py."""

import types

import numpy as np
import pytest

import tiny
from jax_ppo.ppo import report
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.training import checkpoint

HEALTHY = {
    "actor/entropy": 1.0,
    "kl/reference": 0.1,
    "actor/loss": 0.5,
    "actor/skipped": 0.0,
    "reward/accuracy": 0.5,
    "response_length/mean": 4.0,
}


def report_steps(workdir, steps, **changes):
    """Write steps with a Reporter; each has the metrics HEALTHY with these replacements."""
    rewarded = types.SimpleNamespace(failures=0, extra={})
    run = types.SimpleNamespace(config=tiny.config(**changes), total_steps=len(steps))
    with report.Reporter(run, workdir, checkpoint.Progress(), None) as reporter:
        for step, metrics in enumerate(steps):
            reporter.report_later(
                step,
                {name: np.float32(value) for name, value in (HEALTHY | metrics).items()},
                rewarded,
            )
            reporter.flush()


@pytest.mark.parametrize(
    ("option", "figure", "bad", "quantity"),
    [
        ("trainer__warn_entropy_below", "actor/entropy", 0.01, "entropy"),
        ("trainer__warn_kl_above", "kl/reference", 9.0, "KL"),
    ],
)
def test_a_collapse_is_said_once_and_again_when_it_comes_back(
    option, figure, bad, quantity, tmp_path, capsys
):
    report_steps(
        tmp_path,
        [{figure: value} for value in (0.5, bad, bad, 0.5, bad)],
        **{option: 0.1 if bad < 0.1 else 1.0},
    )
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert (
        len(warnings) == 2
        and "step 2" in warnings[0]
        and "step 5" in warnings[1]
        and all(quantity in line for line in warnings)
    )


def test_too_many_skipped_updates_in_a_row_end_the_run(tmp_path):
    skipped = {"critic/skipped": 1.0}
    report_steps(
        tmp_path / "interrupted",
        [skipped, skipped, {}, skipped, skipped],
        trainer__max_skipped_updates=3,
    )
    with pytest.raises(
        FloatingPointError, match="step 4: the gradient was not finite for 3 steps in a row"
    ):
        report_steps(
            tmp_path / "on end", [{}, skipped, skipped, skipped, {}], trainer__max_skipped_updates=3
        )
    # The row of the last step is written as well.
    assert len(read_metrics_csv(tmp_path / "on end" / "training_metrics.csv")) == 4


def test_an_update_is_its_roles(tmp_path):
    report_steps(
        tmp_path,
        [
            {"actor/loss": 0.5, "actor/skipped": 1.0},
            {"actor/loss": 0.5, "critic/loss": 0.25, "actor/skipped": 1.0, "critic/skipped": 2.0},
        ],
    )
    curves = read_metrics_csv(tmp_path / "training_metrics.csv")
    assert [(float(row["update/loss"]), float(row["update/skipped"])) for row in curves] == [
        (0.5, 1.0),
        (0.75, 3.0),
    ]


def test_an_accuracy_that_no_rule_knows_of_is_left_out(tmp_path):
    report_steps(tmp_path, [{"reward/accuracy": np.nan}])
    assert "reward/accuracy" not in read_metrics_csv(tmp_path / "training_metrics.csv")[0]
