"""What a run reports about its steps, and when it stops. Whole runs are in test_train.py."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import sys
import time
import types

import jax
import numpy as np
import pytest
from safetensors import safe_open

import tiny
from character_tokenizer import CharacterTokenizer
from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.reporting import files, journal
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.run import evaluation, ppo_training, reporter
from jax_ppo.run.export import export_models
from jax_ppo.runtime.compiled_programs import Compilations
from jax_ppo.training.networks import Folders
from jax_ppo.training.progress import Progress
from jax_ppo.training.roles import resolve_roles
from jax_ppo.types import NOTHING

HEALTHY = {
    "actor/entropy": 1.0,
    "kl/reference": 0.1,
    "actor/loss": 0.5,
    "actor/skipped": 0.0,
    "reward/accuracy": 0.5,
    "response_length/mean": 4.0,
}


REWARDED = types.SimpleNamespace(failures=0, extra={}, misses=())


def make_reporter(workdir, total_steps=1, progress=None, **changes):
    run = types.SimpleNamespace(
        config=tiny.config(**changes), total_steps=total_steps, tokenizer=CharacterTokenizer()
    )
    return reporter.Reporter(run, workdir, progress or Progress(), Compilations())


def report_steps(workdir, steps, progress=None, flops=None, **changes):
    """Write steps that have the metrics HEALTHY with these replacements; return all rows."""
    rewarded = types.SimpleNamespace(failures=2, extra={"rule_failures": 0.0}, misses=())
    with make_reporter(workdir, len(steps), progress, **changes) as writer:
        for step, metrics in enumerate(steps):
            writer.report_later(step, jax.tree.map(np.float32, HEALTHY | metrics), rewarded, flops)
            writer.write_pending_report()
    return read_metrics_csv(workdir / "training_metrics.csv")


def test_no_figure_of_a_rule_replaces_the_count_of_its_failures(tmp_path):
    (row,) = report_steps(tmp_path, [{}])
    assert row["reward/rule_failures"] == "2.0"


def test_a_run_that_finds_steps_without_a_checkpoint_says_that_it_begins_anew(tmp_path, capsys):
    begins = "warning: the run before ended, after step 2; it left no checkpoint: this run begins"
    report_steps(tmp_path, [{}, {}])
    assert "begins anew" not in capsys.readouterr().out
    report_steps(tmp_path, [{}, {}])
    assert f"{begins} anew\n" in capsys.readouterr().out
    report_steps(tmp_path, [{}] * 3, Progress(step=1))
    with make_reporter(tmp_path, total_steps=0):  # an evaluation
        pass
    assert "the run before" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "figure", "bad", "quantity"),
    [
        ("trainer__warn_entropy_below", "actor/entropy", 0.01, "entropy"),
        ("trainer__warn_kl_above", "kl/reference", 9.0, "KL"),
    ],
)
def test_a_collapse_is_said_once_and_counted_also_after_a_resume(
    option, figure, bad, quantity, tmp_path, capsys
):
    progress = Progress()
    limits = {option: 0.1 if bad < 0.1 else 1.0}
    report_steps(tmp_path, [{figure: value} for value in (0.5, bad, bad, 0.5)], progress, **limits)
    resumed = Progress(step=4, **progress.history())
    report_steps(tmp_path, [{figure: bad}] * 5, resumed, **limits)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "step 2" in warnings[0] and quantity in warnings[0]
    (text,) = resumed.warning_texts()
    assert text.endswith("(7 times, last in step 5)")


def test_a_full_disk_ends_no_run_for_a_page_and_names_the_file_of_figures(
    tmp_path, monkeypatch, capsys
):
    original = os.replace

    def fail_for(name):
        def replace(source, target):
            if pathlib.Path(target).name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as that of a write
            original(source, target)

        monkeypatch.setattr(os, "replace", replace)

    fail_for("report.html")
    monkeypatch.setattr(journal, "REPORT_FREQUENCY", 1)
    assert len(report_steps(tmp_path, [{}, {}])) == 2
    warning = "warning: report.html is not written: No space left on device"
    assert capsys.readouterr().out.count(warning) == 1
    assert not list(tmp_path.glob("*.tmp"))
    fail_for("training_metrics.csv")
    with pytest.raises(OSError) as refusal:
        report_steps(tmp_path, [{}])
    explained = command._explain_write_error(refusal.value, tmp_path, "run")
    assert "the disk is full: training_metrics.csv did not fit" in str(explained)


def test_kept_generation_defaults_are_said_to_differ_from_evaluations(tmp_path, capsys):
    values = {"eos_token_id": 2, "use_cache": True, "temperature": 0.6, "top_k": 20}
    (tmp_path / "actor").mkdir()
    with make_reporter(tmp_path) as journal_of_run:
        for kept in (values, {"eos_token_id": 2, "transformers_version": "5"}):
            (tmp_path / "actor" / "generation_config.json").write_text(json.dumps(kept))
            journal_of_run.report_model(tmp_path / "actor", "model.path")
    (note,) = capsys.readouterr().out.splitlines()
    assert "actor/generation_config.json keeps temperature=0.6, top_k=20: " in note


@pytest.mark.parametrize(
    ("figures", "values", "interval", "outcome"),
    [
        ("accuracy", [0.4, 0.9, 0.8], (0.752, 0.85),
         "accuracy 0.400 → 0.800 after step 2 (95 % 0.75-0.85; best 0.900 after step 1)"),
        ("reward_mean", [-0.5], (-1.0, 0.25), "reward -0.500 after step 0 (95 % -1.00 to 0.25)"),
        ("", [], (), "training reward 0.250 → 0.750 (best 0.750 after step 4)"),
    ],
)  # fmt: skip
def test_the_last_lines_are_the_outcome_the_report_and_the_models(
    figures, values, interval, outcome, tmp_path, capsys
):
    with make_reporter(tmp_path) as before:
        for step, value in enumerate(values):
            ends = zip(("low", "high"), interval if step == len(values) - 1 else (), strict=False)
            means = {figures: value} | {f"{figures}_{end}": bound for end, bound in ends}
            before.write_evaluation(step, means, "")
    with make_reporter(tmp_path, 4, Progress(step=2)) as writer:
        writer.report_model(tmp_path / "actor", "model.path")
        for step, reward in ((2, 0.25), (3, 0.75)):
            metrics = HEALTHY | {"reward/mean": reward}
            writer.report_later(step, jax.tree.map(np.float32, metrics), REWARDED)
            writer.write_pending_report()
        writer.write_summary(4, types.SimpleNamespace(shape={"data": 1}))
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0].startswith(f"curves: tensorboard --logdir {tmp_path}/tensorboard")
    assert lines[1:] == [
        f"{outcome} in 0:00 since step 2",
        f"report: {tmp_path}/report.html",
        f"model: {tmp_path}/actor (for transformers or --config.model.path)",
    ]
    # An evaluation has no curves.
    with make_reporter(tmp_path / "evaluation", 0) as writer:
        writer.write_summary(0, types.SimpleNamespace(shape={"data": 1}))
    assert "curves" not in capsys.readouterr().out


ENDS = ("complete", "ValueError: bad luck", "error: bad options", "stopped by SIGTERM")


@pytest.mark.parametrize("end", ENDS)
def test_the_report_says_when_and_why_a_run_ended(end, tmp_path, monkeypatch):
    if "SIGTERM" in end:
        monkeypatch.setattr(journal.signals, "received_signal", lambda: signal.SIGTERM)
    with contextlib.suppress(ValueError, UserError):
        with make_reporter(tmp_path, 9, Progress(step=3)):
            if "ValueError" in end:
                raise ValueError("bad luck")
            if "error: " in end:
                raise UserError("bad options")
    status = json.loads((tmp_path / "report.json").read_text())["status"]
    assert status.startswith("3 of 9 steps, ended 2") and status.endswith(f": {end}")


def test_too_many_skipped_updates_in_a_row_end_the_run(tmp_path):
    skipped = {"critic/skipped": 1.0}
    limit = {"trainer__max_skipped_updates": 3}
    report_steps(tmp_path / "interrupted", [skipped, skipped, {}, skipped, skipped], **limit)
    with pytest.raises(UserError, match="step 4: the gradient was not finite for 3 steps in a row"):
        report_steps(tmp_path / "on end", [{}, skipped, skipped, skipped, {}], **limit)
    # The row of the last step is written as well.
    assert len(read_metrics_csv(tmp_path / "on end" / "training_metrics.csv")) == 4


def test_an_update_is_its_roles(tmp_path):
    actor, critic = (
        {f"{role}/loss": loss, f"{role}/skipped": skipped}
        for role, loss, skipped in (("actor", 0.5, 1.0), ("critic", 0.25, 2.0))
    )
    rows = report_steps(tmp_path, [actor, actor | critic])
    assert [float(row["update/loss"]) for row in rows] == [0.5, 0.75]
    assert [float(row["update/skipped"]) for row in rows] == [1.0, 3.0]


def test_an_accuracy_that_no_rule_knows_of_is_left_out(tmp_path):
    assert "reward/accuracy" not in report_steps(tmp_path, [{"reward/accuracy": NOTHING}])[0]


def test_a_step_without_a_response_to_learn_from_has_no_figures_of_an_update(tmp_path, capsys):
    """NaN of an update that had responses is a divergence, and stays."""
    nan = {"actor/entropy": np.nan, "actor/loss": np.nan}
    rows = report_steps(tmp_path, [{"response_length/masked_share": 1.0, **nan}, nan, {}])
    figures = ("actor/entropy", "actor/loss", "update/loss")
    assert [[row[name] for name in figures] for row in rows[:2]] == [[""] * 3, ["nan"] * 3]
    assert all(float(rows[2][name]) > 0 for name in figures)
    output = capsys.readouterr().out
    assert "step 1, nothing_left: no response is left to learn from" in output
    assert "collapsed" not in output


def test_throughput_counts_the_tokens_of_all_responses(tmp_path):
    (row,) = report_steps(tmp_path, [{"response_length/mean": 4.0}], rollout__n=2)
    tokens = float(row["tokens_per_second"]) * float(row["seconds/step"])
    assert tokens == pytest.approx(4 * tiny.B * 2)


def test_the_report_is_written_while_a_run_goes_on(tmp_path, monkeypatch):
    reported = []

    def write(self, step, end=""):
        reported.append((step, bool(end)))

    monkeypatch.setattr(reporter.Reporter, "_write_report", write)
    monkeypatch.setattr(journal, "REPORT_FREQUENCY", 3)
    report_steps(tmp_path, [{}] * 7)
    assert reported == [(3, False), (6, False), (7, True)]


def test_the_time_left_is_that_of_as_many_median_steps(tmp_path):
    rows = report_steps(tmp_path, [{}] * 5)
    seconds = [float(row["seconds/step"]) for row in rows]
    left = [float(row["perf/seconds_left"]) for row in rows]
    assert left == pytest.approx([np.median(seconds[: k + 1]) * (4 - k) for k in range(5)])
    per_device = float(rows[0]["perf/tokens_per_second_per_device"])
    assert per_device * jax.device_count() == pytest.approx(float(rows[0]["tokens_per_second"]))


def test_goodput_is_the_share_of_steps_that_still_count(tmp_path):
    """4,000 of 10,000 s counted until the checkpoint; a skipped step adds nothing."""
    progress = Progress(started_at=time.time() - 10_000, kept_seconds=4_000)
    rows = report_steps(tmp_path, [{"actor/skipped": 1.0}, {"actor/skipped": 0.0}], progress)
    for row in rows:
        assert float(row["perf/goodput"]) == pytest.approx(0.4, abs=0.01)
    kept_seconds = progress.kept_seconds - 4_000
    assert kept_seconds == pytest.approx(float(rows[1]["seconds/step"]), abs=1e-4)
    assert progress.history()["kept_seconds"] == progress.kept_seconds


@pytest.mark.parametrize(("kind", "peak"), [("TPU v5 lite", 197e12), ("cpu", None)])
def test_mfu_is_reported_where_the_peak_of_the_devices_is_known(kind, peak, tmp_path, monkeypatch):
    machine = [types.SimpleNamespace(device_kind=kind)] * 8
    monkeypatch.setattr("jax_ppo.runtime.devices.jax.devices", lambda: machine)
    (row,) = report_steps(tmp_path, [{}], flops=1e12)
    if peak is None:
        assert "perf/mfu" not in row
    else:
        utilization = 1e12 / (float(row["seconds/step"]) * 8 * peak)
        assert float(row["perf/mfu"]) == pytest.approx(utilization)


@pytest.mark.parametrize(("dtype", "code"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_the_actor_is_exported_in_the_type_of_the_option(dtype, code, tmp_path):
    config = tiny.config(trainer__export_dtype=dtype)
    run = types.SimpleNamespace(
        config=config,
        states=types.SimpleNamespace(roles=resolve_roles(config)),
        total_steps=1,
        nets=tiny.networks(config),
        folders=Folders(actor=tmp_path / "no_source"),
        tokenizer=types.SimpleNamespace(name_or_path=str(tmp_path / "no_tokenizer")),
        sampling=types.SimpleNamespace(eos_ids=(7, 9)),
    )
    params = tiny.random_params(tiny.ARCHITECTURE, 0, 0, "lm")
    state = types.SimpleNamespace(
        models={"actor": params}, control=types.SimpleNamespace(moments={})
    )
    with reporter.Reporter(run, tmp_path, Progress(), Compilations()) as writer:
        export_models(run, state, tmp_path, writer)
    with safe_open(tmp_path / "actor" / "model.safetensors", framework="numpy") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {code}
    exported = json.loads((tmp_path / "actor" / "config.json").read_text())
    assert dtype in (exported.get("dtype"), exported.get("torch_dtype"))
    # Each token that ended a response of the run.
    generation = json.loads((tmp_path / "actor" / "generation_config.json").read_text())
    assert {7, 9} <= set(exported["eos_token_id"]) == set(generation["eos_token_id"])


@pytest.mark.parametrize(
    ("count", "frequency", "step", "is_logged"),
    [(3, 10, 0, True), (3, 10, 9, True), (3, 10, 8, False), (0, 10, 0, False), (3, 0, 0, False)],
)
def test_samples_are_written_of_the_first_step_and_every_nth(
    count, frequency, step, is_logged, tmp_path, monkeypatch
):
    monkeypatch.setattr(reporter, "describe_step", lambda *_: [])
    changes = {"trainer__log_rollouts": count, "trainer__log_rollouts_freq": frequency}
    with make_reporter(tmp_path, 20, **changes) as writer:
        writer.report_later(step, jax.tree.map(np.float32, HEALTHY), REWARDED, samples=object())
        writer.write_pending_report()
    file = tmp_path / files.SAMPLES_FOLDER / f"training_{step + 1:06d}.jsonl"
    assert file.exists() is is_logged


def test_only_the_main_process_reads_logged_samples(tmp_path, monkeypatch):
    """The main process deletes records of later steps, perhaps while others start."""
    monkeypatch.setattr(journal.distributed, "is_main", lambda: False)
    (tmp_path / files.SAMPLES_FOLDER).mkdir()
    vanished = tmp_path / files.SAMPLES_FOLDER / "training_000001.jsonl"
    vanished.symlink_to(tmp_path / "deleted")
    report_steps(tmp_path, [{}])


def test_responses_of_an_evaluation_that_could_not_be_scored_are_reported(tmp_path, capsys):
    """Regression: nothing but the log said that the accuracy was one of the others alone."""
    rewards = [
        types.SimpleNamespace(failures=count, scored=4, first_failure="") for count in (0, 2, 1)
    ]
    scored = tiny.make_evaluation(1.0)
    failing = evaluation.count_failures(scored, rewards)
    with make_reporter(tmp_path) as writer:
        writer.report_evaluation(0, scored)
        assert "warning" not in capsys.readouterr().out
        writer.report_evaluation(1, failing)
    rows = read_metrics_csv(tmp_path / "training_metrics.csv")
    assert [row.get("eval/rule_failures") for row in rows] == ["", "3.0"]
    warning = "evaluation after step 1: the reward function failed on 3 of 12 responses"
    assert warning in capsys.readouterr().out


def test_an_evaluation_without_a_right_answer_shows_what_was_looked_for(tmp_path, capsys):
    def make_record(correct, answer, truncated):
        response = {"response": "It is 7.", "score": 0.0, "prompt": "3 + 4 ="}
        found = {"ground_truth": "7", "answer": answer, "correct": correct, "truncated": truncated}
        return response | found

    # A calculator wrote 7 in a dialogue, which the rule does not read.
    dialogue = make_record(False, "4", False) | {"response": "3 + 4 =7"}
    ids = [ord(character) for character in "3 + 4 =7"]
    dialogue |= {"response_ids": ids, "action_mask": [1] * 7 + [0]}
    wrong = [make_record(False, None, True), make_record(False, "3", False), dialogue]
    with make_reporter(tmp_path) as writer:
        writer.report_evaluation(0, tiny.make_evaluation(0.0, wrong))
        printed = capsys.readouterr().out
        assert "evaluation after step 0: accuracy 0.000, 1 of 3 responses cut off\n" in printed
        assert "no answer is right\n  looked for '7', in 'It is 7.'\n" in printed
        assert "  looked for '7', read '3' in 'It is 7.'" in printed
        assert "  looked for '7', read '4' in '3 + 4 ='\n" in printed
        right = [make_record(True, "7", False), *wrong]
        writer.report_evaluation(1, tiny.make_evaluation(1 / 4, right))
    assert "looked for" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folder", "rank"), [("actor", 0), ("adapter", 4), ("critic", 0), ("critic", 4)]
)
def test_a_run_that_could_not_export_is_refused_before_it_trains(
    tmp_path, monkeypatch, folder, rank
):
    """Regression: it ended with a traceback after its last step."""
    monkeypatch.setattr(ppo_training, "build_run", lambda *arguments: pytest.fail("it was set up"))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "notes.txt").touch()
    with pytest.raises(UserError, match=f"{folder} exists and holds something other than an exp"):
        ppo_training.train_ppo(tiny.config(model__lora__rank=rank), tmp_path)


def test_earlier_exports_and_those_that_are_not_made_refuse_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_training, "build_run", lambda *_, **__: sys.exit("it is set up"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "notes.txt").touch()
    with pytest.raises(SystemExit):
        ppo_training.train_ppo(tiny.config(), tmp_path)
    with pytest.raises(SystemExit):
        ppo_training.train_ppo(tiny.config(model__lora__rank=4, trainer__export=False), tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    with pytest.raises(SystemExit):
        ppo_training.train_ppo(tiny.config(model__lora__rank=4), tmp_path)
