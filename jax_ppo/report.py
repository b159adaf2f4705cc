"""What a run tells while it goes on: each step's figures, warnings, evaluations, and the summary at its end."""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import numpy as np

from jax_ppo import compilation, distributed, metrics
from jax_ppo.checkpoint import Progress
from jax_ppo.evaluate import Evaluation
from jax_ppo.experiment import Experiment, Rewarded
from jax_ppo.models import heads, hf_export, hf_hub, peft


class Reporter:
    """Turns what a step leaves on the mesh into figures, one step late, and writes everything that a run writes."""

    def __init__(self, run: Experiment, workdir: Path, progress: Progress, compiled: compilation.Compilations):
        self.progress, self._run, self._workdir, self._compiled = progress, run, workdir, compiled
        trainer = run.config.trainer
        self._log = metrics.MetricsLog(workdir, tuple(filter(None, trainer.logger.split(","))), run.config.experiment_name,
                                       dataclasses.asdict(run.config), progress.step, distributed.is_main())
        self._bar = metrics.ProgressBar(run.total_steps, progress.step, distributed.is_main())
        self._pending, self._skipped, self._warned = None, 0, set()
        self._started = self._step_started = time.monotonic()

    def __enter__(self):
        self._log.__enter__()
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        self._bar.__exit__(*error)
        self._log.__exit__(*error)

    def phase(self, name: str):
        return self._bar.phase(name)

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
        if np.isnan(figures["reward/accuracy"]):
            del figures["reward/accuracy"]  # the rules have no notion of right
        self._warn(step + 1, figures)
        figures |= self._bar.take_seconds()
        now = time.monotonic()
        figures["seconds/step"], self._step_started = now - self._step_started, now
        tokens = figures["response_length/mean"] * self._run.config.data.train_batch_size * self._run.config.rollout.n
        figures["tokens_per_second"] = tokens / figures["seconds/step"]
        figures |= {f"reward/{name}": value for name, value in of_rules.items() if f"reward/{name}" not in figures}
        self._log.write(step + 1, figures)
        self._bar.advance(metrics.console_line(step + 1, self._run.total_steps, figures))
        self._skipped = self._skipped + 1 if figures["update/skipped"] else 0
        if self._skipped == self._run.config.trainer.max_skipped_updates:
            raise FloatingPointError(
                f"step {step + 1}: the gradient was not finite for {self._skipped} steps in a row (config.trainer."
                "max_skipped_updates); a smaller config.actor.optim.lr or config.model.dtype=float32 may help")

    def _warn(self, step, figures):
        """Says once that the policy collapses or runs away, and once more each time that it does after it had come back."""
        trainer, entropy, divergence = self._run.config.trainer, figures["actor/entropy"], figures["kl/reference"]
        least, most = trainer.warn_entropy_below, trainer.warn_kl_above
        signs = {}
        if entropy < least:
            signs["entropy"] = (f"the policy's entropy is {entropy:.2g} nats a token (config.trainer.warn_entropy_below="
                                f"{least:g}): it has collapsed or is about to; config.actor.entropy_coeff may help")
        if 0 < most < divergence:
            signs["kl"] = (f"the KL to the reference is {divergence:.2g} nats a token (config.trainer.warn_kl_above={most:g}): "
                           "the policy runs away; a KL penalty or a smaller config.actor.optim.lr may help")
        for name in signs.keys() - self._warned:
            self._bar.say(f"warning: step {step}: {signs[name]}")
        self._warned = set(signs)

    def evaluation(self, done: int, result: Evaluation) -> None:
        """Writes an evaluation and shows some responses."""
        accuracy = result.accuracy
        self.progress.evaluations.append({"step": done, "accuracy": accuracy, "reward_mean": result.reward_mean})
        self._log.write(done, {"eval/reward_mean": result.reward_mean, "eval/response_length": result.length_mean}
                        | ({} if accuracy is None else {"eval/accuracy": accuracy}))
        shown = "" if accuracy is None else f"accuracy {accuracy:.3f}, "
        self._bar.say(f"evaluation after step {done}: {shown}reward {result.reward_mean:.3f}")
        if result.samples:
            self._bar.say(metrics.sample_table(result.samples))
        self._plot()
        self.restart_clock()

    def restart_clock(self) -> None:
        """What has passed since the last step's figures is no part of the next step."""
        self._bar.take_seconds()
        self._step_started = time.monotonic()

    def finish(self, state, export: bool) -> dict:
        """Writes what is still kept, the exported actor if asked, the curves and summary.json."""
        self.flush()
        run, evaluations = self._run, self.progress.evaluations
        if export:
            self._export(state)
        summary = {"experiment_name": run.config.experiment_name, "steps": int(state.step), "total_steps": run.total_steps,
                   "evaluations": evaluations, "seconds": time.monotonic() - self._started,
                   "devices": np.prod(list(run.mesh.shape.values())).item(), "mesh": dict(run.mesh.shape),
                   "compilations": dataclasses.asdict(self._compiled), "versions": metrics.versions()}
        if distributed.is_main():
            self._plot()
            metrics.write_summary(self._workdir, summary)
        return summary

    def _export(self, state):
        """The actor as a Hugging Face folder; with adapters they are merged in it, and stand in a folder of their own too."""
        run, lora, actor = self._run, self._run.nets.actor.lora, heads.without_scalars(state.actor)
        write = functools.partial(hf_export.export, architecture=run.nets.actor.architecture, folder=self._workdir / "actor",
                                  source_folder=run.folders.actor, tokenizer_folder=Path(run.tokenizer.name_or_path))
        if lora is None:
            write(actor)
        else:
            write(state.reference, adapters=actor, lora=lora)
            if obstacle := peft.no_names(run.nets.actor.architecture, lora):
                metrics.say(f"no adapter folder is written: {obstacle}")
                return
            peft.save(actor, run.nets.actor.architecture, lora, self._workdir / "adapter",
                      *hf_hub.where(run.config.model.path, run.folders.actor))

    def _plot(self):
        if distributed.is_main():
            metrics.plot_curves(self._workdir / "training_metrics.csv", self.progress.evaluations,
                                self._workdir / "training_curves.png")
