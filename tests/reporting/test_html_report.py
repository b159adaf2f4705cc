"""report.html: one file with everything in it, whatever a model wrote."""

import dataclasses
import json
import re

import pytest

from jax_ppo import report
from jax_ppo.config import command_line
from jax_ppo.config.schema import Config
from jax_ppo.reporting.files import write_samples
from jax_ppo.reporting.html_report import MAX_POINTS, SHOWN_SAMPLES, SHOWN_STEPS, HTMLReport, Panel
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
    """Return the page and what it has of the run."""
    page = (workdir / "report.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    (run,) = json.loads(text)["runs"]
    return page, run


def test_the_report_has_curves_options_and_warnings(tmp_path):
    (tmp_path / "training_metrics.csv").write_text(
        "step,mine,reward/mean,seconds/rollout,seconds/step\n1,,0.5,0.2,1.0\n2,3.0,0.75,,1.0\n"
    )
    config = dataclasses.replace(Config(), experiment_name="a <b>", seed=5)
    page_report = HTMLReport(tmp_path, dataclasses.asdict(config), PANELS)
    progress = Progress(evaluations=[{"step": 0, "reward": float("nan")}])
    progress.warn("loss", "all is lost", 1)
    progress.changed_options.append("after step 1: more")
    page_report.write("2 of 9 steps", progress)
    page, data = read_data(tmp_path)
    assert "<title>a &lt;b&gt;</title>" in page
    # The plotting library is in the page, which loads nothing.
    assert "Plotly" in page and not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert data["warnings"] == ["all is lost"] and data["changed_options"] == ["after step 1: more"]
    assert data["status"] == "2 of 9 steps"
    assert data["panels"] == [dataclasses.asdict(PANELS[0])]
    # Every metric is there, a researcher's own too.
    assert (data["steps"], data["hours"]) == ([1, 2], [1 / 3600, 2 / 3600])
    assert data["metrics"] == {
        "mine": [None, 3.0],
        "reward/mean": [0.5, 0.75],
        "seconds/rollout": [0.2, None],
        "seconds/step": [1.0, 1.0],
    }
    changed = [row["cells"][:3] for row in data["options"] if row["changed"]]
    assert changed == [["experiment_name", "a <b>", "ppo"], ["seed", "5", "0"]]
    assert [row["changed"] for row in data["options"][:3]] == [True, True, False]


def test_no_text_of_a_model_ends_the_data(tmp_path):
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    record = make_record(response=HOSTILE, prompt=HOSTILE, tokens=[HOSTILE])
    page_report.samples.add("training", 1, [record])
    page_report.write(HOSTILE, Progress(changed_options=[HOSTILE]))
    page, data = read_data(tmp_path)
    assert data["samples"][0]["records"] == [record]
    assert "alert(1)</script>" not in page


def test_few_samples_are_shown_and_all_are_counted(tmp_path):
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    for step in range(1, 41):
        page_report.samples.add("training", step, [make_record() for _ in range(50)])
    page_report.samples.add("evaluation", 40, [make_record()])
    page_report.write("", Progress())
    data = read_data(tmp_path)[1]
    names = [group["name"] for group in data["samples"]]
    assert len(names) == SHOWN_STEPS + 1
    assert names[:2] == ["40 (evaluation)", "40 (training)"] and names[-1] == "1 (training)"
    assert len(data["samples"][-1]["records"]) == SHOWN_SAMPLES
    assert [len(row["score"]) for row in data["distributions"]] == [50] * 40


def test_a_resumed_run_shows_what_was_logged_before(tmp_path):
    for step in (10, 2):
        write_samples(tmp_path, "training", step, [make_record(score=step)])
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    page_report.samples.add_logged(tmp_path)
    page_report.write("", Progress())
    data = read_data(tmp_path)[1]
    assert data["distributions"] == [
        {"step": 2, "score": [2], "length": [1]},
        {"step": 10, "score": [10], "length": [1]},
    ]


def test_a_long_run_has_fewer_points_all_evaluations_and_the_same_hours(tmp_path):
    rows = [f"{step},{step},{'0.5' if step % 999 == 0 else ''},36" for step in range(1, 5001)]
    text = "\n".join(["step,reward/mean,eval/accuracy,seconds/step", *rows])
    (tmp_path / "training_metrics.csv").write_text(f"{text}\n")
    HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS).write("", Progress())
    data = read_data(tmp_path)[1]
    assert len(data["steps"]) <= MAX_POINTS + 5 and data["steps"][-1] == 5000
    assert data["metrics"]["eval/accuracy"].count(0.5) == 5
    assert data["hours"][-1] == pytest.approx(50)


def test_several_runs_are_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        workdir = tmp_path / name
        workdir.mkdir()
        config = dataclasses.replace(Config(), seed=seed)
        command_line.write_config(dataclasses.asdict(config), workdir)
        write_samples(workdir, "training", 1, [make_record(score=seed)])
        (workdir / "training_metrics.csv").write_text(f"step,reward/mean\n1,{seed}\n")
        HTMLReport(workdir, dataclasses.asdict(config), PANELS).write("running", Progress())
    report.main(["report", "a", "b", "--out=page.html"])
    assert capsys.readouterr().out == "report: page.html\n"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    first, second = json.loads(data)["runs"]
    assert (first["name"], second["name"]) == ("a", "b")
    assert [run["metrics"]["reward/mean"] for run in (first, second)] == [[1.0], [2.0]]
    assert second["samples"][0]["records"][0]["score"] == 2
    changed = [row["cells"][:2] for row in second["options"] if row["changed"]]
    assert changed == [["seed", "2"]]


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match="error: .*nowhere: expected the work directory of a run"):
        report.main(["report", str(tmp_path / "nowhere")])
    with pytest.raises(
        SystemExit, match="error: --output=x: no such option; expected RUN or --out"
    ):
        report.main(["report", "--output=x"])
