"""report.html: one file with everything in it, whatever a model wrote."""

import dataclasses
import json
import re

from jax_ppo.config.schema import Config
from jax_ppo.reporting.curves import Panel
from jax_ppo.reporting.html_report import SHOWN_SAMPLES, SHOWN_STEPS, HTMLReport
from jax_ppo.reporting.sample_files import write_samples
from jax_ppo.training.progress import Progress

PANELS = (
    Panel(title="reward", unit="score", curves={"mean": "reward/mean", "held out": "eval/reward"}),
)
HOSTILE = "</script><script>alert(1)</script>@@DATA@@ \x1b[31m \u2028"


def make_record(**changes):
    record = {
        "prompt": "1 + 1?",
        "response": "2",
        "tokens": ["2"],
        "response_ids": [7],
        "score": 1.0,
        "correct": True,
        "truncated": False,
        "address": {"sample": 0},
        "advantages": [0.5],
    }
    return record | changes


def read_data(workdir):
    """Return the page and the data in it."""
    page = (workdir / "report.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return page, json.loads(text)


def test_the_report_has_curves_options_and_warnings(tmp_path):
    (tmp_path / "training_metrics.csv").write_text(
        "step,reward/mean,seconds/rollout,seconds/step\n1,0.5,0.2,1.0\n2,0.75,,1.0\n"
    )
    config = dataclasses.replace(Config(), experiment_name="a <b>", seed=5)
    report = HTMLReport(tmp_path, config, PANELS)
    progress = Progress(evaluations=[{"step": 0, "reward": float("nan")}])
    progress.warn("loss", "all is lost", 1)
    progress.changed_options.append("after step 1: more")
    report.write("2 of 9 steps", progress)
    page, data = read_data(tmp_path)
    assert "<title>a &lt;b&gt;</title>" in page
    # The plotting library is in the page, which loads nothing.
    assert "Plotly" in page and not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert data["warnings"] == ["all is lost"] and data["changed_options"] == ["after step 1: more"]
    assert data["status"] == "2 of 9 steps"
    (panel,) = data["panels"]
    assert panel["curves"][0] == {
        "legend": "mean",
        "is_evaluation": False,
        "steps": [1, 2],
        "values": [0.5, 0.75],
    }
    assert data["phases"] == [{"legend": "rollout", "steps": [1, 2], "values": [0.2, 0.0]}]
    changed = [row["cells"][:3] for row in data["options"] if row["changed"]]
    assert changed == [["experiment_name", "a <b>", "ppo"], ["seed", "5", "0"]]
    assert [row["changed"] for row in data["options"][:3]] == [True, True, False]


def test_no_text_of_a_model_ends_the_data(tmp_path):
    report = HTMLReport(tmp_path, Config(), PANELS)
    record = make_record(response=HOSTILE, prompt=HOSTILE, tokens=[HOSTILE])
    report.add_samples("training", 1, [record])
    report.write(HOSTILE, Progress(changed_options=[HOSTILE]))
    page, data = read_data(tmp_path)
    assert data["samples"][0]["records"] == [record]
    assert "alert(1)</script>" not in page


def test_few_samples_are_shown_and_all_are_counted(tmp_path):
    report = HTMLReport(tmp_path, Config(), PANELS)
    for step in range(1, 41):
        report.add_samples("training", step, [make_record() for _ in range(50)])
    report.add_samples("evaluation", 40, [make_record()])
    report.write("", Progress())
    data = read_data(tmp_path)[1]
    names = [group["name"] for group in data["samples"]]
    assert len(names) == SHOWN_STEPS + 1
    assert names[:2] == ["40 (evaluation)", "40 (training)"] and names[-1] == "1 (training)"
    assert len(data["samples"][-1]["records"]) == SHOWN_SAMPLES
    assert [len(row["score"]) for row in data["distributions"]] == [50] * 40


def test_a_resumed_run_shows_what_was_logged_before(tmp_path):
    for step in (10, 2):
        write_samples(tmp_path, "training", step, [make_record(score=step)])
    report = HTMLReport(tmp_path, Config(), PANELS)
    report.add_logged_samples()
    report.write("", Progress())
    data = read_data(tmp_path)[1]
    assert data["distributions"] == [
        {"step": 2, "score": [2], "length": [1]},
        {"step": 10, "score": [10], "length": [1]},
    ]
