"""Reports of a PPO run: metrics of each step, warnings, evaluations and summary."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ppo.ppo.rewarding import RuleRewards, policy_text
from jax_ppo.ppo.step import StepResult
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.html_report import Panel
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.rewards.batch import Miss, describe_misses
from jax_ppo.rewards.reward_functions import is_by_rules
from jax_ppo.run.diagnostics import Diagnosis, nothing_is_left
from jax_ppo.run.evaluation import Evaluation
from jax_ppo.run.parts import PPORun
from jax_ppo.run.sample_reports import describe_step
from jax_ppo.runtime.compiled_programs import Compilations
from jax_ppo.training.progress import Progress
from jax_ppo.types import with_nan

# fmt: off
COLUMNS = (
    console.Column("reward/mean", 6, 3, "reward "),
    console.Column("reward/accuracy", 5, 3, "acc ", equal_to="reward/mean", least_terminal=40),
    console.Column("kl/reference", 6, 4, "kl ", least_terminal=50),
    console.Column("actor/entropy", 5, 3, "ent ", least_terminal=60),
    console.Column("response_length/mean", 4, 0, "len ", least_terminal=70),
    console.Column("actor/clip_fraction", 5, 3, "clip ", least_terminal=80),
    console.Column("actor/grad_norm", 5, 3, "grads ", least_terminal=130),
    console.Column("critic/grad_norm", 5, 3, least_terminal=130),
    console.Column("seconds/step", 4, 2, unit=" s"),
    console.Column("tokens_per_second", 7, 0, unit=" tok/s", least_terminal=130),
)
CRITIC_COLUMNS = (
    console.Column("critic/explained_variance", 6, 3, "explained "),
    console.Column("critic/loss", 6, 4, "loss ", least_terminal=60),
    console.Column("critic/grad_norm", 5, 3, "grads ", least_terminal=70),
    *(column for column in COLUMNS if not column.metric.startswith(("kl/", "actor/", "critic/"))),
)
PANELS = (
    Panel("reward", "score", {
        "mean": "reward/mean",
        "evaluation": "eval/reward_mean"}),
    Panel("accuracy", "share of responses", {
        "training": "reward/accuracy",
        "evaluation": "eval/accuracy"}),
    Panel("KL to the reference", "nats per token", {"KL": "kl/reference"}),
    Panel("KL to the teacher", "nats per token", {
        "sampled tokens": "teacher/kl", "vocabulary": "actor/teacher_kl"}),
    Panel("entropy", "nats per token", {"entropy": "actor/entropy"}),
    Panel("response length", "tokens", {
        "mean": "response_length/mean", "max": "response_length/max"}),
    Panel("truncated responses", "share of responses", {
        "training": "response_length/truncated_share"}),
    Panel("approximate KL of an update", "nats per token", {"KL": "actor/approx_kl"}),
    Panel("clip fraction", "share of tokens", {
        "actor": "actor/clip_fraction", "critic": "critic/clip_fraction"}),
    Panel("explained variance", "share", {
        "critic": "critic/explained_variance", "evaluation": "eval/critic/explained_variance"}),
    Panel("losses", "loss", {"actor": "actor/loss", "critic": "critic/loss"}),
    Panel("gradient norm", "before clipping", {
        "actor": "actor/grad_norm", "critic": "critic/grad_norm"}),
    Panel("learning rate", "", {"actor": "actor/lr", "critic": "critic/lr"}),
    journal.SPEED_PANEL,
    Panel("time per phase", "seconds", {
        "sampling": "seconds/rollout", "update": "seconds/update",
        "forward passes": "seconds/forward", "rewards": "seconds/reward"}),
)
LAYOUT = journal.ReportLayout(
    columns=COLUMNS, panels=PANELS, learning_rate_option="actor.optim.lr",
    best_metric="reward/mean")
CRITIC_LAYOUT = dataclasses.replace(
    LAYOUT, columns=CRITIC_COLUMNS, learning_rate_option="critic.optim.lr",
    best_metric="critic/explained_variance")
# fmt: on


class Reporter(journal.Journal):
    """Writes the metrics of each step, one step late, and everything else that a run reports."""

    def __init__(
        self, run: PPORun, workdir: Path, progress: Progress, compiled: Compilations
    ) -> None:
        super().__init__(
            trainer=run.config.trainer,
            options=dataclasses.asdict(run.config),
            total_steps=run.total_steps,
            layout=CRITIC_LAYOUT if run.config.trainer.critic_only else LAYOUT,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )
        self._run = run
        rows = read_metrics_csv(workdir / "training_metrics.csv")  # of a run that is resumed
        first_kls = [float(row["kl/reference"]) for row in rows if row.get("kl/reference")]
        self._diagnosis = Diagnosis(run.config, run.total_steps, next(iter(first_kls), None))

    def report_later(
        self,
        step: int,
        on_mesh: dict[str, jax.Array],
        rule_rewards: RuleRewards,
        flops: float | None = None,
        samples: StepResult | None = None,
        on_host: Mapping[str, float] | None = None,
    ) -> None:
        """Keep a step's metrics until they can be fetched without waiting; write samples if due.

        `on_mesh` has scalars by name, `on_host` further metrics; `flops` is for `perf/mfu`.
        """
        completed_steps, trainer = step + 1, self._run.config.trainer
        frequency = trainer.log_rollouts and trainer.log_rollouts_freq
        if not frequency or (step and completed_steps % frequency):
            samples = None
        # The rule may report a figure of that name, too.
        figures = {**rule_rewards.extra, "reward/rule_failures": rule_rewards.failures}
        figures |= on_host or {}
        misses = rule_rewards.misses

        def write() -> None:
            # Fetching waits for the update, so this is the time that the host lost to it.
            with self.phase("update"):
                fetched = jax.device_get(on_mesh)
            metrics = {name: float(with_nan(value)) for name, value in fetched.items()}
            written = self._write_metrics(completed_steps, metrics, figures, flops)
            for kind, message in self._diagnosis.observe(written, misses).items():
                self.warn(f"step {completed_steps}, {kind}: {message}", kind)
            if samples is not None:
                address = {"seed": self._run.config.seed, "stream": "training", "step": step}
                count, tokenizer = trainer.log_rollouts, self._run.tokenizer
                records = describe_step(samples, count, tokenizer, address)
                self.write_samples("training", completed_steps, records)

        self.write_later(write)

    def _write_metrics(
        self,
        completed_steps: int,
        metrics: dict[str, float],
        on_host: Mapping[str, float],
        flops: float | None,
    ) -> dict[str, float]:
        """Write the metrics of a step that have a value, and return them; see `write_step`."""
        # Totals over the roles that are trained; a shared trunk has no `critic/skipped`.
        for name in ("loss", "skipped"):
            actor_share = metrics.get(f"actor/{name}", 0.0)
            metrics[f"update/{name}"] = actor_share + metrics.get(f"critic/{name}", 0.0)
        # A metric of the loop wins over a rule's figure of the same name.
        metrics = {**on_host, **metrics}
        # What has no value is absent. NaN of an update that had responses is a divergence.
        without_value = {"reward/accuracy", *on_host}
        if self._run.config.learns_from_files:  # with log-probs that may not be known
            without_value |= {name for name in metrics if name.startswith("rollout/")}
        if nothing_is_left(metrics):
            without_value |= metrics.keys()
        for name in without_value:
            if np.isnan(metrics[name]):
                del metrics[name]
        return self.write_step(
            completed_steps,
            metrics,
            tokens=metrics["response_length/mean"] * self._run.config.samples_per_step,
            skipped=bool(metrics["update/skipped"]),
            flops=flops,
        )

    def report_evaluation(
        self, completed_steps: int, evaluation: Evaluation, subject: str = ""
    ) -> None:
        """Write an evaluation of `subject`, by default the model after these steps."""
        title = (
            f"evaluation of {subject}" if subject else f"evaluation after step {completed_steps}"
        )
        shown, means = _describe_evaluation(evaluation)
        self.write_samples("evaluation", completed_steps, evaluation.records)
        first_responses = evaluation.records[:: evaluation.responses_per_prompt]
        if samples := first_responses[: self._run.config.trainer.log_samples]:
            shown += "\n" + console.format_sample_table(samples)
        if evaluation.failures:
            self.warn(
                f"{title}: the reward function failed on "
                f"{evaluation.failures} of {evaluation.scored} responses, which have "
                "config.reward.fallback_score and no part in the accuracy",
                kind="failures in evaluations",
            )
        self.write_evaluation(completed_steps, means, shown, title)
        if evaluation.accuracy == 0:
            wrong = (record for record in evaluation.records if record["correct"] is False)
            misses = (Miss(x["ground_truth"], self._read_text(x), x["answer"]) for x in wrong)
            by_rules = is_by_rules(self._run.config.reward)
            lines = ["no answer is right", *describe_misses(misses, by_rules)]
            self.warn(f"{title}: " + "\n  ".join(lines), kind="no right answer")

    def _read_text(self, record: Mapping[str, Any]) -> str:
        if "action_mask" not in record:
            return record["response"]
        ids, mask = np.array(record["response_ids"]), np.array(record["action_mask"], bool)
        starts = np.array(record.get("turn_starts", np.zeros_like(ids)), bool)
        return policy_text(self._run.tokenizer, ids, mask, starts)


def _describe_evaluation(evaluation: Evaluation) -> tuple[str, dict[str, float | None]]:
    """Return the text for the console, and all figures by name."""
    shown = f"reward {evaluation.reward_mean:.3f}"
    if evaluation.accuracy is not None:
        accuracy = f"accuracy {evaluation.accuracy:.3f}"
        is_reward = math.isclose(evaluation.accuracy, evaluation.reward_mean, abs_tol=1e-6)
        shown = accuracy if is_reward else f"{accuracy}, {shown}"
    cut = sum(record["truncated"] for record in evaluation.records)
    if cut:
        shown += f", {cut} of {len(evaluation.records)} responses cut off"
    # Intervals and the critic's parts are in the files: the console names the figures themselves.
    figures = [
        f"{name} {value:.3f}"
        for name, value in evaluation.figures.items()
        if not name.endswith(("_low", "_high")) and not name.startswith("critic/")
    ]
    failures = {"rule_failures": float(evaluation.failures)} if evaluation.failures else {}
    means = {
        "accuracy": evaluation.accuracy,
        "reward_mean": evaluation.reward_mean,
        "response_length": evaluation.length_mean,
        **evaluation.figures,
        **failures,
    }
    return ", ".join([shown, *figures]), means
