"""What a run tells while it goes on: each step's figures, warnings, evaluations, and the summary at its end."""

import functools
from pathlib import Path

import jax
import numpy as np

from jax_ppo.models import heads
from jax_ppo.models.hf.hub import shareable_model_name
from jax_ppo.models.hf.peft import peft_obstacle, save_adapters
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.ppo.evaluation import Evaluation
from jax_ppo.ppo.setup import Experiment, Rewarded
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.curves import Panel
from jax_ppo.runtime import compilation
from jax_ppo.training.checkpoint import Progress

COLUMNS = (
    console.Column(metric="reward/mean", width=6, format=".3f", label="reward "),
    console.Column(metric="reward/accuracy", width=5, format=".3f", label="acc ", optional=True),
    console.Column(metric="kl/reference", width=6, format=".4f", label="kl "),
    console.Column(metric="actor/entropy", width=5, format=".3f", label="ent "),
    console.Column(metric="response_length/mean", width=4, format=".0f", label="len "),
    console.Column(metric="actor/clip_fraction", width=5, format=".3f", label="clip "),
    console.Column(metric="actor/grad_norm", width=5, format=".3g", label="grads "),
    console.Column(metric="critic/grad_norm", width=5, format=".3g"),
    *journal.SPEED_COLUMNS,
)
PANELS = (
    Panel(
        title="reward",
        unit="score",
        curves={"mean": "reward/mean", "evaluation": "eval/reward_mean"},
    ),
    Panel(
        title="accuracy",
        unit="share of responses",
        curves={"training": "reward/accuracy", "evaluation": "eval/accuracy"},
    ),
    Panel(title="KL to the reference", unit="nats per token", curves={"KL": "kl/reference"}),
    Panel(title="entropy", unit="nats per token", curves={"entropy": "actor/entropy"}),
    Panel(
        title="response length",
        unit="tokens",
        curves={"mean": "response_length/mean", "max": "response_length/max"},
    ),
    Panel(
        title="clip fraction",
        unit="share of tokens",
        curves={"actor": "actor/clip_fraction", "critic": "critic/clip_fraction"},
    ),
    Panel(title="explained variance", unit="share", curves={"critic": "critic/explained_variance"}),
    Panel(title="losses", unit="loss", curves={"actor": "actor/loss", "critic": "critic/loss"}),
)
LAYOUT = journal.ReportLayout(columns=COLUMNS, panels=PANELS, learning_rate_option="actor.optim.lr")


class Reporter(journal.Journal):
    """Turns what a step leaves on the mesh into figures, one step late, and writes everything that a run of PPO writes."""

    def __init__(
        self, run: Experiment, workdir: Path, progress: Progress, compiled: compilation.Compilations
    ):
        super().__init__(
            config=run.config,
            total_steps=run.total_steps,
            layout=LAYOUT,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )
        self._run = run
        self._pending, self._warned = None, set()

    def later(self, step: int, on_mesh: dict, rewarded: Rewarded) -> None:
        """Keeps a step's metrics, and what the rules report, until they can be fetched without a wait."""
        self._pending = (step, on_mesh, {"rule_failures": rewarded.failures} | rewarded.extra)

    def flush(self) -> None:
        """Fetches and writes the metrics kept. Raises FloatingPointError after too many steps in a row with skipped updates."""
        if self._pending is None:
            return
        step, on_mesh, of_rules = self._pending
        self._pending = None
        with self.phase("update"):
            figures = {name: float(value) for name, value in jax.device_get(on_mesh).items()}
        for name in ("loss", "skipped"):
            figures[f"update/{name}"] = figures[f"actor/{name}"] + figures.get(
                f"critic/{name}", 0.0
            )
        if np.isnan(figures["reward/accuracy"]):
            del figures["reward/accuracy"]  # the rules have no notion of right
        self._warn(step + 1, figures)
        tokens = (
            figures["response_length/mean"]
            * self._run.config.data.train_batch_size
            * self._run.config.rollout.n
        )
        figures |= {
            f"reward/{name}": value
            for name, value in of_rules.items()
            if f"reward/{name}" not in figures
        }
        self.write_step(step + 1, figures, tokens, bool(figures["update/skipped"]))

    def _warn(self, step, figures):
        """Says once that the policy collapses or runs away, and once more each time that it does after it had come back."""
        trainer, entropy, divergence = (
            self._run.config.trainer,
            figures["actor/entropy"],
            figures["kl/reference"],
        )
        least, most = trainer.warn_entropy_below, trainer.warn_kl_above
        signs = {}
        if entropy < least:
            signs["entropy"] = (
                f"the policy's entropy is {entropy:.2g} nats a token (config.trainer.warn_entropy_below="
                f"{least:g}): it has collapsed or is about to; config.actor.entropy_coeff may help"
            )
        if 0 < most < divergence:
            signs["kl"] = (
                f"the KL to the reference is {divergence:.2g} nats a token (config.trainer.warn_kl_above={most:g}): "
                "the policy runs away; a KL penalty or a smaller config.actor.optim.lr may help"
            )
        for name in signs.keys() - self._warned:
            self._bar.print_line(f"warning: step {step}: {signs[name]}")
        self._warned = set(signs)

    def evaluation(self, done: int, result: Evaluation) -> None:
        """Writes an evaluation and shows some responses."""
        shown = "" if result.accuracy is None else f"accuracy {result.accuracy:.3f}, "
        shown += f"reward {result.reward_mean:.3f}"
        if result.samples:
            shown += "\n" + console.format_sample_table(result.samples)
        self.write_evaluation(
            done,
            {
                "accuracy": result.accuracy,
                "reward_mean": result.reward_mean,
                "response_length": result.length_mean,
            },
            shown,
        )

    def finish(self, state, export: bool) -> dict:
        """Writes what is still kept, the exported actor if asked, the curves and summary.json."""
        self.flush()
        if export:
            self._export(state)
        return self.write_summary(int(state.step), self._run.mesh)

    def _export(self, state):
        """The actor as a Hugging Face folder; with adapters they are merged in it, and stand in a folder of their own too."""
        run, lora, actor = (
            self._run,
            self._run.nets.actor.lora,
            heads.without_scalar_head(state.actor),
        )
        write = functools.partial(
            export_checkpoint,
            architecture=run.nets.actor.architecture,
            folder=self._workdir / "actor",
            source_folder=run.folders.actor,
            tokenizer_folder=Path(run.tokenizer.name_or_path),
        )
        if lora is None:
            write(actor)
        else:
            write(state.reference, adapters=actor, lora=lora)
            if obstacle := peft_obstacle(run.nets.actor.architecture, lora):
                console.print_on_main(f"no adapter folder is written: {obstacle}")
                return
            save_adapters(
                actor,
                run.nets.actor.architecture,
                lora,
                self._workdir / "adapter",
                *shareable_model_name(run.config.model.path, run.folders.actor),
            )
