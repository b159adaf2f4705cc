"""report.html: one file with everything in it, whatever a model wrote."""

import dataclasses
import html
import json
import re
import shutil
import subprocess

import pytest

from jax_ppo import report
from jax_ppo.config import command_line
from jax_ppo.config.schema import Config, Trainer
from jax_ppo.reporting import html_report
from jax_ppo.reporting.files import write_samples
from jax_ppo.reporting.html_report import MAX_POINTS, SHOWN_SAMPLES, SHOWN_STEPS, HTMLReport, Panel
from jax_ppo.training.progress import Progress

PANELS = (
    Panel(title="reward", unit="score", curves={"mean": "reward/mean", "held out": "eval/reward"}),
    Panel(title="accuracy", unit="share", curves={"mean": "reward/accuracy"}),
    Panel(title="clip", unit="share", curves={"actor": "actor/clip_fraction", "critic": "mine"}),
    Panel(title="KL", unit="nats", curves={"KL": "kl/reference"}),
)
needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
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


def read_page(path):
    """Return the text of a page and its data."""
    page = path.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return page, json.loads(text)


def read_data(workdir):
    """Return the page and what it has of the run."""
    page, data = read_page(workdir / "report.html")
    (run,) = data["runs"]
    return page, run


def write_run(workdir, table, panels=PANELS, records=(), **options):
    """Write the files of a run with this training_metrics.csv, and its report."""
    workdir.mkdir(exist_ok=True)
    config = dataclasses.asdict(dataclasses.replace(Config(), **options))
    command_line.write_config(config, workdir)
    (workdir / "training_metrics.csv").write_text(table)
    if records:
        write_samples(workdir, "training", 1, records)
    page_report = HTMLReport(workdir, config, panels)
    page_report.add_logged_samples()
    page_report.write("running", Progress())


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
    # Every metric is there, a researcher's own too.
    assert (data["steps"], data["hours"]) == ([1, 2], [1 / 3600, 2 / 3600])
    assert data["metrics"] == {
        "mine": [None, 3.0],
        "reward/mean": [0.5, 0.75],
        "seconds/rollout": [0.2, None],
        "seconds/step": [1.0, 1.0],
    }
    assert [data["options"][name] for name in ("experiment_name", "seed")] == ["a <b>", "5"]
    defaults = read_page(tmp_path / "report.html")[1]["defaults"]
    assert defaults["seed"] == ["0", "seed of all randomness"]


def test_the_top_of_the_page_has_outcome_duration_speed_and_device(tmp_path):
    """Three steps of 40, 10 and 10 seconds with 4,000, 2,000 and 3,000 tokens."""
    write_run(
        tmp_path,
        "step,eval/accuracy,eval/accuracy_high,eval/accuracy_low,seconds/step,tokens_per_second\n"
        "0,0.41796875,0.46,0.38,,\n1,,,,40,100\n2,0.97,,,10,200\n3,0.955,0.9714,0.938,10,300\n",
    )
    data = read_data(tmp_path)[1]
    assert data["headline"] == "accuracy 0.418 → 0.955 (95\u00a0% 0.938–0.971)"
    best, duration, speed, device = data["facts"]
    assert (best, duration) == ("best 0.97 after step 2", "1:00 of training")
    assert speed == "150 tokens per second" and device.endswith("× cpu")
    write_run(tmp_path, "step,eval/loss\n4,2.5\n")
    data = read_data(tmp_path)[1]
    assert data["headline"] == "loss 2.5" and len(data["facts"]) == 1
    # Regression: a first loss of NaN was the best.
    write_run(tmp_path, "step,train/loss\n1,nan\n2,1.5\n3,2.5\n")
    assert read_data(tmp_path)[1]["facts"][0] == "best 1.5 after step 2"
    assert read_page(tmp_path / "report.html")[1]["comparison"][0][4] == "steps to 1.5"
    # The policy of a critic that is trained alone does not change.
    table = "step,eval/accuracy,eval/critic/explained_variance\n0,0.4,-0.5\n5,0.4,0.25\n"
    write_run(tmp_path, table, trainer=Trainer(critic_only=True))
    assert read_data(tmp_path)[1]["headline"] == "explained variance -0.5 → 0.25"


def test_equal_panels_are_one_and_curves_of_zeros_are_in_the_list_of_further_metrics(tmp_path):
    write_run(
        tmp_path,
        "step,actor/clip_fraction,eval/critic/bias_tenth_1,kl/reference,mine,reward/accuracy,"
        "reward/mean,rollout/turns\n1,0.0,0.5,0.0,0.5,0.25,0.25000001,2.0\n2,0.0,,0.0,,1.0,1.0,2.0\n",
    )
    data = read_page(tmp_path / "report.html")[1]
    shown = {panel["title"]: panel["curves"] for panel in data["panels"]}
    assert shown == {"accuracy = reward": {"mean": "reward/accuracy"}, "clip": {"critic": "mine"}}
    assert data["further"] == [
        ["actor/clip_fraction", "share of tokens", "tokens clipped by actor.clip_ratio"],
        ["kl/reference", *html_report.describe_metric("kl/reference")],
        ["rollout/turns", "turns", "turns of a dialogue"],
    ]


@pytest.mark.parametrize(("last", "tick"), [(0, 1), (3, 1), (5, 1), (6, 2), (30, 10), (1200, 500)])
def test_an_axis_of_steps_has_whole_steps_as_ticks(tmp_path, last, tick):
    write_run(tmp_path, f"step,mine\n{last},1.0\n")
    assert read_page(tmp_path / "report.html")[1]["tick"] == tick


def test_the_critic_is_plotted_by_its_newest_evaluation_from_0_to_1(tmp_path):
    names = [f"eval/critic/{x}_bin_{part}" for x in ("return", "value") for part in range(1, 11)]
    old, new = ["9.0"] * 20, [str(place / 10) for place in range(20)]
    rows = (["step", *names], ["1", *old], ["2", *new], ["3", *[""] * 20])
    write_run(tmp_path, "".join(",".join(row) + "\n" for row in rows))
    data = read_page(tmp_path / "report.html")[1]
    critic = data["runs"][0]["critic"]
    assert critic["return_bin"] == pytest.approx([place / 10 for place in range(10)])
    assert critic["value_bin"][9] == 1.9 and data["calibration"] == [0, 1.9]
    write_run(tmp_path, "step,eval/critic/value_bin_1,eval/critic/return_bin_1\n1,0.97,0.98\n")
    assert read_page(tmp_path / "report.html")[1]["calibration"] == [0, 1]


def test_signed_figures_are_scaled_to_their_percentile_and_others_to_their_extremes(tmp_path):
    """One outlier of 1000 among 20 advantages of size 1 leaves the others their color."""
    advantages = [1.0, -1.0] * 10 + [0.0] * 20 + [1000.0]
    records = [
        make_record(advantages=advantages, values=[0.25, 0.75], logprobs=[-3.0, -1.0]),
        make_record(advantages=None, values=[0.5, None], logprobs=[-2.0], rewards=[0.0]),
    ]
    write_run(tmp_path, "step,mine\n1,1.0\n", records=records)
    scales = read_data(tmp_path)[1]["samples"][0]["scales"]
    assert scales == {
        "advantages": {"low": -1.0, "high": 1.0, "signed": True},
        "values": {"low": 0.25, "high": 0.75, "signed": False},
        "logprobs": {"low": -3.0, "high": -1.0, "signed": False},
    }


def test_no_text_of_a_model_ends_the_data(tmp_path):
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    record = make_record(response=HOSTILE, prompt=HOSTILE, tokens=[HOSTILE])
    page_report.add_samples("training", 1, [record])
    page_report.write(HOSTILE, Progress(changed_options=[HOSTILE]))
    page, data = read_data(tmp_path)
    assert data["samples"][0]["records"] == [record]
    assert "alert(1)</script>" not in page


def test_few_samples_are_shown_the_newest_first(tmp_path):
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    for step in range(1, 41):
        page_report.add_samples("training", step, [make_record() for _ in range(50)])
    page_report.add_samples("evaluation", 40, [make_record()])
    page_report.write("", Progress())
    data = read_data(tmp_path)[1]
    names = [group["name"] for group in data["samples"]]
    assert len(names) == SHOWN_STEPS + 1
    assert names[:2] == ["40 (evaluation)", "40 (training)"] and names[-1] == "1 (training)"
    assert len(data["samples"][-1]["records"]) == SHOWN_SAMPLES


def test_a_resumed_run_shows_what_was_logged_before(tmp_path):
    for step in (10, 2):
        write_samples(tmp_path, "training", step, [make_record(score=step)])
    page_report = HTMLReport(tmp_path, dataclasses.asdict(Config()), PANELS)
    page_report.add_logged_samples()
    page_report.write("", Progress())
    groups = read_data(tmp_path)[1]["samples"]
    assert [group["name"] for group in groups] == ["10 (training)", "2 (training)"]
    assert [group["records"][0]["score"] for group in groups] == [10, 2]


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
    table = (
        "step,eval/accuracy,reward/mean,seconds/step,tokens_per_second\n0,{},,,\n1,{},{},60,100\n"
    )
    for name, seed, values in (("a", 1, (0, 0.5, 1)), ("b", 2, (0.25, 1, 2))):
        records = [make_record(score=seed)]
        write_run(tmp_path / name, table.format(*values), records=records, seed=seed)
    monkeypatch.chdir(tmp_path / "a")
    report.main(["report", ".", "../b", "--out=../page.html"])
    assert capsys.readouterr().out == "report: ../page.html\n"
    data = read_page(tmp_path / "page.html")[1]
    first, second = data["runs"]
    assert (first["name"], second["name"]) == ("a", "b")
    assert [run["metrics"]["reward/mean"] for run in (first, second)] == [[None, 1.0], [None, 2.0]]
    assert second["samples"][0]["records"][0]["score"] == 2
    assert (first["options"]["seed"], second["options"]["seed"]) == ("1", "2")
    # The level is 0 + 0.9 * (1 - 0): only the second run reaches it.
    assert data["comparison"] == [
        ["run", "first accuracy", "best", "last", "steps to 0.9", "time to 0.9", "tokens", "state"],
        ["a", "0", "0.5 after step 1", "0.5", "–", "–", "6,000", "running"],
        ["b", "0.25", "1 after step 1", "1", "1", "1:00", "6,000", "running"],
    ]


def test_seeds_of_one_configuration_are_averaged_in_the_steps_that_all_have(tmp_path):
    runs = {"a": (0, "1,1.0\n2,2.0\n3,9.0\n"), "b": (1, "1,3.0\n2,\n"), "c": (1, "1,5.0\n")}
    for name, (seed, rows) in runs.items():
        trainer = Trainer(log_samples=9) if name == "c" else Trainer()
        write_run(tmp_path / name, f"step,mine\n{rows}", seed=seed, trainer=trainer)
    html_report.write_comparison([tmp_path / name for name in "acb"], tmp_path / "page.html")
    mean, single = read_page(tmp_path / "page.html")[1]["averages"]
    assert single == 1 and mean["name"] == "a (mean of 2 seeds)" and mean["steps"] == [1, 2]
    assert mean["metrics"] == {
        "mine": [2.0, None],
        "mine_low": [1.0, None],
        "mine_high": [3.0, None],
    }
    html_report.write_comparison([tmp_path / "a", tmp_path / "c"], tmp_path / "page.html")
    assert read_page(tmp_path / "page.html")[1]["averages"] is None


def show_in_browser(path, script):
    """Return what a script that makes `seen` finds on a page, 500 pixels wide."""
    page = path.read_text(encoding="utf-8")
    script = f"{script}; document.body.replaceChildren(JSON.stringify(seen));"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom")
    command = ["chromium", *options, path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(html.unescape(re.search(r"<body>(.*)</body>", shown.stdout, re.S)[1]))


@needs_browser
def test_a_browser_shows_titles_tables_and_the_numbers_of_a_tapped_token(tmp_path):
    """What only the script of the page decides, read from the document that it makes."""
    record = make_record(
        **{"prompt_index": 3, "sample_index": 1, "tokens": ["<b>", "x"], "response_ids": [1, 2]},
        **{"advantages": [0.5, -0.25], "address": {"seed": 0, "sample": 7}, "prompt": HOSTILE},
    )
    table = "step,kl/reference,reward/mean\n1,0.0,0.5\n2,0.0,0.75\n"
    write_run(tmp_path, table, records=[record], seed=5)
    seen = show_in_browser(
        tmp_path / "report.html",
        """
      const response = document.querySelector("#samples pre:not(.prompt)");
      response.children[0].click();
      response.onkeydown({ key: "ArrowRight", preventDefault() {} });
      const all = (selector) => [...document.querySelectorAll(selector)];
      const text = (selector) => all(selector).map((one) => one.textContent);
      const seen = { headline: text(".headline"), cards: text("#samples h3"),
        address: document.querySelector("#samples h3").title, numbers: text(".numbers"),
        colors: [...response.children].map((one) => one.style.background),
        plots: document.querySelectorAll("#curves .plot svg.main-svg").length > 0,
        panels: text("#curves h3"), further: text("#further code"),
        options: [...document.querySelectorAll("#options tr")].map((row) => [...row.children].map(
          (cell) => cell.textContent)), open: document.querySelectorAll("details[open]").length,
        meaning: getComputedStyle(document.querySelector(".meaning")).display,
        smooth: smooth([0, 3], 0.5) }""",
    )
    assert seen["headline"] == ["training reward 0.5 → 0.75"]
    assert seen["cards"] == ["prompt 3, sample 1 score 1 · 2 tokens"]
    assert seen["address"] == "seed 0, sample 7"
    assert seen["numbers"] == ['token 2 "x" · advantages -0.25']
    # The 95th percentile of 0.25 and 0.5 is 0.4875: full orange, then 0.513 of blue; full is 0.6.
    assert seen["colors"] == ["rgba(240, 140, 20, 0.6)", "rgba(60, 120, 230, 0.31)"]
    assert seen["panels"] == ["reward score"] and seen["plots"]
    assert seen["further"] == ["kl/reference"] and seen["open"] == 0
    assert seen["options"] == [["option", "value", "default"], ["seed", "5", "0"]]
    assert seen["meaning"] == "none"  # on a phone
    assert seen["smooth"] == [0, 2]  # 3 and half of 0, over 1.5


@needs_browser
def test_a_browser_shows_one_legend_of_runs_which_hides_them(tmp_path):
    for seed, name in enumerate("abc"):
        trainer = Trainer(log_samples=9) if name == "c" else Trainer()
        table = f"step,actor/lr,mine\n1,0.5,{seed}\n2,0.5,9\n"
        write_run(tmp_path / name, table, seed=seed, trainer=trainer, panels=PANELS[2:3])
    html_report.write_comparison([tmp_path / name for name in "abc"], tmp_path / "page.html")
    seen = show_in_browser(
        tmp_path / "page.html",
        """
      const boxes = () => [...document.querySelectorAll("#legend label")];
      const plot = () => document.querySelector("#curves .plot");
      const curves = () => plot().data.map((one) => one.name || "");
      const seen = { mean: boxes().map((one) => one.textContent), curves: curves() };
      byId("average").click();
      boxes()[0].querySelector("input").click();
      Object.assign(seen, { single: boxes().map((one) => one.textContent), left: curves(),
        rows: document.querySelectorAll("#comparison tr").length })""",
    )
    assert seen["mean"] == [" a (mean of 2 seeds)", " c"]
    # The ends of the band have no names.
    assert seen["curves"] == ["", "", "a (mean of 2 seeds) critic", "c critic"]
    assert seen["single"] == [" a", " b", " c"] and seen["left"] == ["b critic", "c critic"]
    assert seen["rows"] == 4


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match="error: .*nowhere: expected the work directory of a run"):
        report.main(["report", str(tmp_path / "nowhere")])
    for word, message in (
        ("--output=x", "--output=x: no such option. Did you mean '--out'"),
        ("--out=", "--out: write --out=VALUE"),
        (f"--out={tmp_path}", f"--out={tmp_path}: is a folder"),
    ):
        with pytest.raises(SystemExit, match=f"error: {message}"):
            report.main(["report", "run", word])


def test_a_run_is_judged_by_what_its_newest_evaluation_measured():
    """Regression: after a change of the reward function the page kept a former accuracy."""
    rows = {"eval/accuracy": 4, "eval/reward_mean": 9, "reward/mean": 12}
    assert html_report.known_outcomes(rows, False) == ["eval/reward_mean", "reward/mean"]
    rows["eval/accuracy"] = 9
    assert html_report.known_outcomes(rows, False)[0] == "eval/accuracy"
