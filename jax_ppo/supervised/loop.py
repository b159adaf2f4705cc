"""Training on given responses, before PPO: the loop of jax_ppo.sft and of jax_ppo.reward_model, and what they tell."""

import collections
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config import notes
from jax_ppo.config.schema import Config
from jax_ppo.data import prompts as prompts_lib
from jax_ppo.data import responses, sources
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.models import heads
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.models.hf.load import has_score_head, load_checkpoint, read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.reporting import console, journal
from jax_ppo.reporting.curves import Panel
from jax_ppo.runtime import compilation, sharding
from jax_ppo.supervised import step as fitting
from jax_ppo.training import packing
from jax_ppo.training import resume as resuming
from jax_ppo.training import setup as shared_setup
from jax_ppo.training.checkpoint import Checkpointer, Progress
from jax_ppo.training.networks import Folders, read_networks


@dataclasses.dataclass(frozen=True)
class Task:
    """What one of the commands does.

    Attributes:
      command: its name.
      objective: what is learned.
      kinds: the responses that an example must have.
      unit: what an example is, in the plural, for the console.
      output: the folder in the work directory where the trained model is written.
      layout: how its figures are shown.
    """

    command: str
    objective: fitting.Objective
    kinds: tuple[str, ...]
    unit: str
    output: str
    layout: journal.ReportLayout


_LOSS, _GRADIENT = (
    console.Column(metric="train/loss", width=6, format=".3f", label="loss "),
    console.Column(metric="train/grad_norm", width=5, format=".3g", label="grads "),
)
_GRADIENT_PANEL = Panel(
    title="gradient", unit="norm before clipping", curves={"norm": "train/grad_norm"}
)
_RATE = "supervised.optim.lr"
SFT = Task(
    "sft",
    fitting.LANGUAGE,
    responses.DEMONSTRATION_FIELDS,
    "examples",
    "actor",
    journal.ReportLayout(
        columns=(_LOSS, _GRADIENT, *journal.SPEED_COLUMNS),
        panels=(
            Panel(
                title="loss",
                unit="nats per token",
                curves={"training": "train/loss", "evaluation": "eval/loss"},
            ),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_RATE,
    ),
)
REWARD_MODEL = Task(
    "reward_model",
    fitting.PREFERENCE,
    responses.PREFERENCE_FIELDS,
    "pairs",
    "reward_model",
    journal.ReportLayout(
        columns=(
            _LOSS,
            console.Column(metric="train/accuracy", width=5, format=".3f", label="acc "),
            console.Column(metric="train/margin", width=6, format=".3f", label="margin "),
            _GRADIENT,
            *journal.SPEED_COLUMNS,
        ),
        panels=(
            Panel(
                title="loss",
                unit="a pair, center_coef included",
                curves={"training": "train/loss", "evaluation": "eval/loss"},
            ),
            Panel(
                title="accuracy",
                unit="share of pairs",
                curves={"training": "train/accuracy", "evaluation": "eval/accuracy"},
            ),
            Panel(
                title="scores",
                unit="score",
                curves={
                    "margin": "train/margin",
                    "mean": "train/score",
                    "margin, evaluation": "eval/margin",
                },
            ),
            _GRADIENT_PANEL,
        ),
        learning_rate_option=_RATE,
    ),
)


def train(config: Config, workdir: Path, task: Task) -> dict:
    """Runs a command, from the newest checkpoint in `workdir` if there is one. Returns what summary.json holds."""
    mesh, trainer = sharding.make_mesh(config.mesh), config.trainer
    with (
        jax.set_mesh(mesh),
        compilation.count_compilations() as compiled,
        Checkpointer(workdir / "checkpoints", trainer.max_checkpoints, "quality") as checkpoints,
    ):
        run = Run(config, task, mesh)
        progress = resuming.find_progress(
            config, run.total_steps, checkpoints, console.print_on_main, task.command
        )
        with Reporter(run, workdir, progress, compiled) as report:
            params, optimizer_state = run.begin(checkpoints, progress.step)
            report.restart_clock()
            if run.held_out and not progress.step and trainer.val_before_train:
                report.evaluation(0, run.evaluate(params))
            batches = run.batches(progress.position)
            for number in range(progress.step, run.total_steps):
                batch = run.on_mesh(run.training, next(batches).indices)
                params, optimizer_state, figures = fitting.step(
                    task.objective,
                    config.supervised,
                    run.model,
                    run.total_steps,
                    params,
                    optimizer_state,
                    run.everywhere(np.int32(number)),
                    *batch,
                )
                report.flush()  # of the step before, while this one is computed
                report.later(number + 1, figures)
                done, quality = number + 1, None
                if run.held_out and resuming.is_due(done, run.total_steps, trainer.test_freq):
                    report.flush()  # the step's time ends before the evaluation's begins
                    quality = report.evaluation(done, run.evaluate(params))
                stop = checkpoints.should_stop(done)
                if stop or resuming.is_due(done, run.total_steps, trainer.save_freq):
                    report.flush()
                    meta = {
                        "position": batches.position,
                        "evaluations": progress.evaluations,
                        "config": dataclasses.asdict(config),
                    }
                    checkpoints.save(
                        done,
                        {"params": params, "optimizer": optimizer_state},
                        meta,
                        {"quality": quality},
                    )
                    report.restart_clock()
                if stop:
                    checkpoints.wait()
                    return report.finish(done)
            if trainer.export:
                export_checkpoint(
                    params,
                    run.architecture,
                    workdir / task.output,
                    source_folder=run.folder,
                    tokenizer_folder=Path(run.tokenizer.name_or_path),
                )
            return report.finish(run.total_steps)


class Run:
    """What a run is made of, built in the order in which things can be wrong: cheap checks first, weights last.

    Attributes:
      config, task, mesh: as given.
      folder: of the model that training starts from; `model` is its network.
      training, held_out: ResponseDatasets; held_out is None without validation files.
      tokenizer: the model's, or config.model.tokenizer_path's.
      total_steps: of the whole run.
    """

    def __init__(self, config: Config, task: Task, mesh):
        self.config, self.task, self.mesh = config, task, mesh
        for note in notes.supervised_notes(config, task.command):
            console.print_on_main(f"note: {note}")
        data = config.data
        load = functools.partial(
            sources.load_examples,
            prompt_key=data.prompt_key,
            instruction=data.instruction,
            response_key=config.supervised.response_key,
            seed=config.seed,
        )
        training = load(data.train_files)
        held_out = (
            load(data.val_files, option="config.data.val_files")[: data.val_max_samples]
            if data.val_files
            else []
        )
        for examples, option in (
            (training, "config.data.train_files"),
            (held_out, "config.data.val_files"),
        ):
            responses.validate_responses(
                examples, task.kinds, option, config.supervised.response_key
            )
        self.folder = resolve_model_folder(config.model.path)
        self.tokenizer = (
            tokenizer_lib.load_tokenizer(config.model.tokenizer_path)
            if config.model.tokenizer_path
            else tokenizer_lib.load_tokenizer(str(self.folder), option="config.model.path")
        )
        shared_setup.validate_model(
            mesh, read_architecture(self.folder), self.tokenizer, config.sequence_length
        )
        if task.objective.head == "scalar" and has_score_head(self.folder):
            console.print_on_main(
                f"note: config.model.path={config.model.path!r} has a scalar head; it is left out, a new one is made"
            )
        console.print_on_main(f"tokenising {len(training) + len(held_out)} {task.unit}")
        self.training = self._tokenize(training, "config.data.train_files")
        self.held_out = self._tokenize(held_out, "config.data.val_files") if held_out else None
        self._row_length = config.packing.row_length or packing.row_width(
            max(data.longest for data in (self.training, self.held_out) if data)
        )
        rows = dataclasses.replace(
            config, packing=dataclasses.replace(config.packing, row_length=self._row_length)
        )
        self.model = read_networks(rows, Folders(self.folder, None, None)).actor
        steps_per_epoch = self.batches(0).steps_per_epoch
        self.total_steps = (
            config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch
        )
        console.print_on_main(
            f"{len(self.training)} training and {len(self.held_out or ())} held-out {task.unit}, {self.total_steps} "
            f"steps of {data.train_batch_size}"
        )

    @property
    def architecture(self):
        """The model's, which in what is written ends with the tokenizer's EOS too, the one that responses are learned with."""
        known = self.model.architecture
        return dataclasses.replace(
            known, eos_ids=tuple(dict.fromkeys((*known.eos_ids, self.tokenizer.eos_token_id)))
        )

    def batches(self, position: int) -> prompts_lib.PromptBatches:
        """Training batches from a position on, in examples consumed; their `indices` are what counts here."""
        data = self.config.data
        return prompts_lib.PromptBatches(
            self.training.prompts, data.train_batch_size, data.shuffle, self.config.seed, position
        )

    def everywhere(self, array) -> jax.Array:
        return sharding.place(array, sharding.replicated(self.mesh))

    def on_mesh(self, dataset: responses.ResponseDataset, rows, count: int | None = None):
        """These rows of a data set, as fitting.step takes them: sequences, packing and its count of micro-batches.

        Args:
          count: how many of the rows are real; those behind them are not packed. None: all.
        """
        sequences = dataset.sequences(rows)
        lengths = (sequences.prompt_lengths + sequences.lengths).reshape(len(self.task.kinds), -1)
        at_once = packing.rows_per_micro_batch(
            self.config.supervised.micro_batch_size_per_device,
            self._row_length,
            len(rows),
            sharding.row_shards(self.mesh),
        )
        real = np.arange(len(rows)) < (len(rows) if count is None else count)
        plan, counts = packing.plan_packing(
            lengths.sum(0) * real,
            np.arange(len(rows))[None],
            at_once,
            self._row_length,
            self.config.packing.enabled,
        )
        plan = jax.tree.map(lambda x: x[0], plan)
        if len(self.task.kinds) > 1:
            plan = packing.split_pairs(plan, lengths[0])
        return (
            self.everywhere(sequences),
            sharding.place(plan, sharding.rows(self.mesh, axis=1)),
            self.everywhere(counts[0]),
        )

    def begin(self, checkpoints: Checkpointer, step: int):
        """Parameters and optimizer state to begin with: the model's, or those of the checkpoint after `step` steps."""
        shapes = jax.eval_shape(
            functools.partial(heads.init_params, self.model, head=self.task.objective.head),
            jax.random.key(0),
        )
        init = fitting.optimizer(self.config.supervised).init
        trees = {"params": shapes, "optimizer": jax.eval_shape(init, shapes)}
        where = sharding.tree_shardings(self.mesh, trees, sharding.TRAIN_RULES)
        if step:
            abstract = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), trees, where
            )
            arrays, _ = checkpoints.restore(step, abstract)
            return arrays["params"], arrays["optimizer"]
        params = load_checkpoint(
            self.folder,
            self.model.architecture,
            where["params"],
            jnp.float32,
            self.task.objective.head,
            console.make_loading_reporter("model"),
        )
        return params, jax.jit(init, out_shardings=where["optimizer"])(params)

    def evaluate(self, params) -> dict[str, float]:
        """Means over the held-out examples."""
        sums = collections.Counter()
        for batch in prompts_lib.evaluation_batches(
            self.held_out.prompts, self.config.data.val_batch_size
        ):
            measured = fitting.measure(
                self.task.objective,
                self.config.supervised,
                self.model,
                params,
                *self.on_mesh(self.held_out, batch.indices, batch.count),
            )
            sums.update({name: float(value) for name, value in jax.device_get(measured).items()})
        units = sums.pop("units")
        return {name: sums[name] / units for name in self.task.objective.names}

    def _tokenize(self, examples, name) -> responses.ResponseDataset:
        data = self.config.data
        return responses.tokenize_responses(
            examples,
            self.tokenizer,
            self.task.kinds,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            filter_overlong_prompts=data.filter_overlong_prompts,
            truncation=data.truncation,
            chat_template=data.chat_template,
            name=name,
        )


class Reporter(journal.Journal):
    """Writes what a run tells, each step's figures one step late."""

    def __init__(
        self, run: Run, workdir: Path, progress: Progress, compiled: compilation.Compilations
    ):
        super().__init__(
            config=run.config,
            total_steps=run.total_steps,
            layout=run.task.layout,
            workdir=workdir,
            progress=progress,
            compiled=compiled,
        )
        self._mesh = run.mesh
        self._pending = None

    def later(self, step: int, figures: dict) -> None:
        """Keeps a step's figures until they can be fetched without a wait."""
        self._pending = (step, figures)

    def flush(self) -> None:
        """Fetches and writes the figures kept. Raises FloatingPointError after too many steps in a row that were skipped."""
        if self._pending is None:
            return
        (step, figures), self._pending = self._pending, None
        figures = {f"train/{name}": float(value) for name, value in jax.device_get(figures).items()}
        self.write_step(step, figures, figures["train/tokens"], bool(figures["train/skipped"]))

    def evaluation(self, done: int, means: dict[str, float]) -> float:
        """Writes an evaluation. Returns what the best checkpoint is chosen by."""
        self.write_evaluation(
            done, means, ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        )
        return means.get("accuracy", -means["loss"])

    def finish(self, steps: int) -> dict:
        """Writes what is still kept, the curves and summary.json."""
        self.flush()
        return self.write_summary(steps, self._mesh)
