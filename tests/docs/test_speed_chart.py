"""The charts, and the figures quoted from them, show the stored results."""

import importlib.util
import json
import re

import pytest

import doc_pages


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(
        name, doc_pages.ROOT / "benchmarks" / f"{name}.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


speed_chart, curves_chart = load_script("speed_chart"), load_script("curves_chart")


def medians(name: str) -> dict[str, float]:
    """Return each side's median in milliseconds per token, read without the chart's code."""
    file = doc_pages.ROOT / "benchmarks" / "results" / f"{name}.json"
    sides = json.loads(file.read_text())["sides"]
    return {side: figures["milliseconds_per_token"]["median"] for side, figures in sides.items()}


def test_bars_are_the_medians_of_the_results():
    for _, name in speed_chart.PANELS:
        stored = medians(name)
        bars = speed_chart.read_panel(name)
        assert bars[0][0] == "jax_ppo" and bars[0][1] == stored["ours"]
        assert sorted(bar[1] for bar in bars) == sorted(
            median for side, median in stored.items() if side != "floor"
        )
        assert all(fastest <= median <= slowest for _, median, fastest, slowest in bars)


def test_the_chart_is_drawn(tmp_path):
    speed_chart.draw_chart(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_the_readme_quotes_the_medians():
    quoted = re.search(r"!\[Milliseconds.*?\]", (doc_pages.ROOT / "README.md").read_text())[0]
    panels = [medians(name) for _, name in speed_chart.PANELS]
    expected = {
        "jax_ppo": [panel["ours"] for panel in panels],
        "hand-written torch": [panel["torch"] for panel in panels],
        "TRL": [panel["trl"] for panel in panels if "trl" in panel],
        "tunix": [panel["tunix"] for panel in panels if "tunix" in panel],
    }
    for side, figures in expected.items():
        low, high = re.search(rf"{side} ([\d.]+) (?:to|and) ([\d.]+)", quoted).groups()
        assert (low, high) == (f"{min(figures):.2f}", f"{max(figures):.2f}"), side
    results = doc_pages.ROOT / "benchmarks" / "results" / "time_to_sums.json"
    runs = json.loads(results.read_text())["runs"]
    sums = {name: [run["cpu_seconds"] for run in own] for name, own in runs.items()}
    assert {len(seconds) for seconds in sums.values()} == {3}
    bars = {label: figures for label, *figures in speed_chart.read_sums()}
    for side, label, word in (
        ("ours, PPO", "jax_ppo, PPO", "sums: PPO"),
        ("ours, GRPO", "jax_ppo, GRPO", ", GRPO"),
        ("TRL, GRPO", "TRL 1.12.0, GRPO", "TRL's GRPO"),
    ):
        low, median, high = sorted(sums[side])
        assert bars[label] == [median, low, high] and f"{word} {median:.0f}" in quoted


def test_the_benchmarks_page_quotes_ratios_of_the_medians():
    text = (doc_pages.ROOT / "docs" / "development" / "benchmarks.md").read_text()
    short_rule, long_rule, short_model, long_model = (
        medians(name) for _, name in speed_chart.PANELS
    )
    tunix = f"{short_rule['tunix'] / short_rule['ours']:.1f} times as fast | "
    tunix += f"{long_rule['tunix'] / long_rule['ours']:.1f} times"
    trl = f"{short_model['trl'] / short_model['ours']:.1f} times | "
    trl += f"{long_model['trl'] / long_model['ours']:.1f} times"
    assert f"| tunix 0.1.7 | {tunix} |" in text
    assert f"| TRL 1.12.0, with a reward model | {trl} |" in text


def test_the_results_page_quotes_the_accuracies_of_its_charts(tmp_path):
    text = (doc_pages.ROOT / "docs" / "results.md").read_text()
    for chart, trained, row in (
        ("sums", "all weights", r"sums\]\(#two-digit-sums\) \| SmolLM2-135M"),
        ("sums", "LoRA", r"the same, adapters \| SmolLM2-135M"),
        ("gsm8k", "all weights", r"Qwen2.5-Coder-0.5B"),
    ):
        runs = curves_chart.read_curves(curves_chart.CHARTS[chart][0], "eval/accuracy")
        curves = [points for (name, _), points in runs.items() if name == trained]
        quoted = re.search(rf"{row} \| (\S+) \| (\S+) \|", text).groups()
        for said, place in zip(quoted, (0, -1), strict=True):
            values = sorted(points[place][1] for points in curves)
            low, _, high = said.partition("-")
            assert float(low) == pytest.approx(values[0], abs=1e-3)
            assert float(high or low) == pytest.approx(values[-1], abs=1e-3)
        curves_chart.draw_chart(chart, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 10_000
