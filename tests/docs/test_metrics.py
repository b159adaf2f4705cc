"""docs/metrics.md has a row for every metric that a run can log, and for nothing else."""

import ast
import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

import doc_pages
import metrics_page
from jax_ppo.kernels import importance
from jax_ppo.reporting import html_report
from jax_ppo.run import critic_quality, evaluation_statistics
from jax_ppo.run.reporter import COLUMNS, CRITIC_COLUMNS, PANELS
from jax_ppo.training.supervised_step import LANGUAGE, PREFERENCE

GROUPS = (
    "actor|advantages|critic|environment|eval|kl|memory|perf|response_length|reward|rollout|"
    "seconds|teacher"
)
NAME = re.compile(rf"({GROUPS}|train|update)/[a-z_]+(/[a-z_]+)?")
TEMPLATE = re.compile(rf"(({GROUPS}|train|update|\{{role\}})/|\{{self\.prefix\}})[\w{{}}.]+")
PRODUCERS = ("memory", "ppo", "reporting", "run", "runtime", "supervised", "training")
ROLES = ("actor", "critic")


def syntax() -> Iterator[ast.AST]:
    """Yield the syntax of the packages that make metrics."""
    for package in PRODUCERS:
        for path in (doc_pages.ROOT / "jax_ppo" / package).rglob("*.py"):
            yield from ast.walk(ast.parse(path.read_text()))


def evaluation_figures() -> set[str]:
    """Return the figures of two sources, with and without defined correctness."""
    figures: set[str] = {"accuracy", "reward_mean", "response_length", "rule_failures"}
    scores = np.ones((2, 2))
    for correct in (scores, np.full((2, 2), np.nan)):
        answers = np.full((2, 2), "1", object)
        figures |= evaluation_statistics.describe_prompts(
            scores, correct, answers, ["one", "one"]
        ).keys()
    tokens = np.arange(10.0)
    critic = critic_quality.describe_critic(
        [critic_quality.Predictions(tokens, tokens, tokens.astype(int))]
    )
    figures |= {re.sub(r"_\d+$", "_K", f"critic/{name}") for name in critic}
    figures = {re.sub(r"@\d+", "@K", name) for name in figures}
    return {f"eval/{name}" for name in figures} | {"eval/SOURCE/NAME"}


def supervised_figures() -> set[str]:
    made = {*LANGUAGE.names, *PREFERENCE.names, "router_loss"}
    return {f"train/{name}" for name in made | {"lr", "grad_norm", "skipped", "tokens"}}


def phases() -> set[str]:
    """Return the seconds of each `phase("NAME")`."""
    return {
        f"seconds/{node.args[0].value}"
        for node in syntax()
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "phase"
        and isinstance(node.args[0], ast.Constant)
    }


def both(name: str) -> set[str]:
    return {f"{role}/{name}" for role in ROLES}


# What the formatted names in the package stand for. A new one has to be added here.
EXPANSIONS = {
    "actor/{name}": {"actor/NAME"},  # a policy loss of the user's
    "advantages/{key}": {"advantages/NAME"},
    "critic/{name}": set(),  # read, not made
    "environment/{name}": {"environment/NAME", "environment/failed", "eval/environment/NAME"},
    "eval/{name}": evaluation_figures()
    | {f"eval/{name}" for name in {*LANGUAGE.names, *PREFERENCE.names}},
    "reward/{name}": {"reward/NAME", "reward/rule_failures", "reward/model_inputs_cut"},
    "rollout/{name}": {
        f"rollout/{name}" for name in importance.mismatch(jnp.zeros(2), jnp.zeros(2), jnp.ones(2))
    },
    "seconds/{name}": phases(),
    "train/{name}": supervised_figures(),
    "update/{name}": {"update/loss", "update/skipped"},
    "{self.prefix}grad_norm": both("grad_norm"),
    "{self.prefix}skipped": both("skipped"),
    "{self.prefix}steps_taken": {"actor/steps_taken"},  # critics have no target_kl
}


def constants() -> set[str]:
    """Return the names that stand in the package as they are logged."""
    return {
        node.value
        for node in syntax()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    }


def templates() -> set[str]:
    """Return the names that the package formats."""
    found = set()
    for node in syntax():
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            ]
            if TEMPLATE.fullmatch(text := "".join(parts)):
                found.add(text)
    return found


def test_the_test_knows_what_each_formatted_name_stands_for():
    assert templates() == EXPANSIONS.keys()


def test_every_metric_stands_on_the_page_once_and_no_other_does():
    made = {"tokens_per_second", *constants()}.union(*EXPANSIONS.values())
    assert sorted(metrics_page.documented()) == sorted(made)


def test_names_of_other_libraries_stand_beside_metrics_that_exist():
    table = metrics_page.PAGE.read_text().partition("| here | verl | TRL |")[2]
    named = re.findall(r"^\| ([a-z][^|`]*) \|", table, re.MULTILINE)
    assert len(named) > 15
    assert {name for row in named for name in row.split(", ")} <= set(metrics_page.documented())


def test_what_the_console_and_the_curves_show_stands_on_the_page():
    shown = {column.metric for column in (*COLUMNS, *CRITIC_COLUMNS)}
    shown |= {name for panel in PANELS for name in panel.curves.values()}
    assert metrics_page.unknown(shown) == set()
    assert metrics_page.unknown({"actor/los", "eval/pass@k"}) == {"eval/pass@k"}


def test_a_report_can_show_unit_and_meaning_of_a_metric_without_its_neighbours():
    table = html_report.read_metrics_table()
    assert sorted(table) == sorted(metrics_page.documented())
    for name, (unit, meaning) in table.items():
        assert unit and meaning, name
        assert not re.search(r"as above|^the same|the actor's$|^its |[`\\]|\]\(", meaning), name
        assert not re.search(r"as above|as the", unit), name
    assert html_report.describe_metric("eval/pass@16") == table["eval/pass@K"]
    assert html_report.describe_metric("reward/turns") == table["reward/turns"]
    assert html_report.describe_metric("reward/mine") == table["reward/NAME"]
    assert "|log-prob difference|" in table["rollout/exp_abs_log_ratio_mean"][1]
