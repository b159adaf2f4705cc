"""The progress of a run, how it is resumed, and what is due after a step."""

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ppo.config.option import option_value
from jax_ppo.config.schema import Config, all_options, flatten_options
from jax_ppo.errors import UserError, counted
from jax_ppo.training.checkpoint import Checkpointer


@dataclasses.dataclass
class Progress:
    """How far a run has come: with trained arrays and options, all that a checkpoint holds."""

    step: int = 0  # number of completed steps
    position: int = 0  # training examples consumed
    # For each evaluation so far a dict of `step` and the means by name; `None`: undefined.
    evaluations: list[dict] = dataclasses.field(default_factory=list)
    # Whether the evaluation after this step was interrupted: a resumed run begins with it.
    evaluation_pending: bool = False
    # When the run was started for the first time, in seconds since 1970.
    started_at: float = dataclasses.field(default_factory=time.time)
    # Seconds of steps that still count: not repeated after an interruption, not without an update.
    kept_seconds: float = 0.0
    # By kind, `text`, `first_step`, `last_step` and `count` of a warning.
    warnings: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # Lines about options that a resume has changed.
    changed_options: list[str] = dataclasses.field(default_factory=list)

    def warn(self, kind: str, text: str, step: int) -> bool:
        """Record a warning after `step` steps; return whether it is the first of its kind."""
        known = self.warnings.get(kind)
        # Replaced, not changed: a checkpoint is written while the run continues.
        self.warnings[kind] = {
            "text": known["text"] if known else text,
            "first_step": known["first_step"] if known else step,
            "last_step": step,
            "count": known["count"] + 1 if known else 1,
        }
        return known is None

    def warning_texts(self) -> list[str]:
        """Return the warnings so far, repeated ones with their number and last step."""
        return [
            warning["text"]
            + f"\n({warning['count']} times, last in step {warning['last_step']})"
            * (warning["count"] > 1)
            for warning in self.warnings.values()
        ]

    def history(self) -> dict[str, Any]:
        """Return the part of a checkpoint's `meta` that reports of the run continue from."""
        # Copies: a checkpoint is written while the run continues.
        return {name: copy.copy(getattr(self, name)) for name in HISTORY}


HISTORY = tuple(  # what a resumed run continues from, besides its step and position
    field.name for field in dataclasses.fields(Progress) if field.name not in ("step", "position")
)


# Sections whose options may change the training rows, and those of their options that do not.
_ROW_SECTIONS = ("data.", "score.", "rollout.multi_turn.")
_NOT_OF_ROWS = (
    *("data.train_batch_size", "data.val_files", "data.val_batch_size", "data.val_max_samples"),
    "data.shuffle",
)


def is_due(completed_steps: int, total_steps: int, frequency: int) -> bool:
    """Return whether something is due that happens every `frequency` steps and after the last.

    A frequency of 0 means only after the last step, and -1 never.
    """
    is_multiple = frequency > 0 and completed_steps % frequency == 0
    # The last step always counts, so that a run ends with an evaluation and a checkpoint.
    return frequency >= 0 and (is_multiple or completed_steps == total_steps)


class SavedRun(NamedTuple):
    """The newest checkpoint in a work directory, which a run continues."""

    config: Config  # the present options
    step: int
    meta: dict[str, Any]
    changes: dict[str, tuple[object, object]]  # of options by name: the former value, the present
    lines: list[str]  # about these, for the user


def refuse_saved_run(checkpoints: Checkpointer) -> None:
    """Raise `UserError` if there is a checkpoint, which `trainer.resume=False` does not expect."""
    if (latest := checkpoints.latest_step()) is not None:
        raise UserError(
            "config.trainer.resume=False: the work directory holds a checkpoint after step "
            f"{latest}; give another --workdir, or remove it"
        )


def find_saved_run(config: Config, checkpoints: Checkpointer, command: str) -> SavedRun | None:
    """Return the checkpoint that a run continues, `None` without one; no arrays are read.

    Options that `command` does not read may change. Raise `UserError` if the run cannot be resumed
    with these options.
    """
    latest = checkpoints.latest_step()
    if latest is None:
        return None
    meta = checkpoints.restore(latest, {}).meta
    if meta.get("command", command) != command:
        raise UserError(
            f"--workdir: the work directory holds checkpoints of jax_ppo.{meta['command']}, which "
            f"jax_ppo.{command} cannot resume; give another --workdir"
        )
    values = former_values(meta["config"])
    changes, lines = {}, []
    for option in all_options():
        name, now, then = option.name, option_value(config, option.name), values[option.name]
        if now == then:
            continue
        if option.facts.fixed_on_resume and command in option.read_by:
            raise UserError(
                f"config.{name}={now!r}: the work directory holds checkpoints of another "
                f"experiment, with {then!r}; set that, or give another --workdir"
            )
        # Other changes are permitted, and reported.
        line = f"config.{name} was {then!r} until the checkpoint, and is {now!r} from here on"
        if any(rule.first_step_only and rule.is_met(config) for rule in option.facts.rules):
            line = f"config.{name}={now!r}: only a new run reads it; this one began with {then!r}"
        changes[name] = (then, now)
        lines.append(line)
    removed = {name: x for name, x in flatten_options(meta["config"]).items() if name not in values}
    if removed:
        listed = ", ".join(f"{name}={value!r}" for name, value in removed.items())
        line = f"options of the checkpoint that this version does not have: {listed}"
        lines.append(line)
    return SavedRun(config, latest, meta, changes, lines)


def find_progress(
    total_steps: int,
    saved: SavedRun | None,
    report: Callable[[str], None],
    data: dict[str, Any],
    frozen: dict[str, str] | None = None,
) -> Progress:
    """Return the progress of a saved run, or none if there is no checkpoint.

    `data` and `frozen` are the fingerprints of the training data and, by the options that name
    them, of frozen models. `report` is called with lines for the user. Raise `UserError` if data or
    models have changed.
    """
    if saved is None:
        return Progress()
    config, latest, meta, changed_options, changes = saved
    for option, digest in (frozen or {}).items():
        if meta.get("frozen", {}).get(option, digest) != digest:
            raise UserError(
                f"config.{option}={option_value(config, option)!r}: its files have changed since "
                "the checkpoint; restore them, or give another --workdir"
            )
    rows = meta["data"]
    if any(rows[name] != data[name] for name in rows.keys() & data.keys()):
        name = "score.file" if config.learns_from_files else "data.train_files"
        files = f"config.{name}={option_value(config, name)!r}"
        if (template := config.data.prompt_template).startswith("@"):
            files += f", config.data.prompt_template={template!r}"
        raise _changed_rows_error(files, changed_options, rows["rows"], data["rows"])
    outlook = f"resuming after step {latest} of {total_steps}"
    if latest >= total_steps:
        more = f", and {latest - total_steps} more" * (latest > total_steps)
        outlook = (
            f"done: {counted(total_steps, 'step')}{more}; to train further, set "
            "config.trainer.total_training_steps higher, or give another --workdir"
        )
    for line in (*changes, outlook):
        report(line)
    if latest >= total_steps:
        changes = []  # of options that no step has used
    history = {name: meta[name] for name in HISTORY}
    history["changed_options"] = [
        *history["changed_options"],
        *(f"after step {latest}: {change}" for change in changes),
    ]
    return Progress(step=latest, position=meta["position"], **history)


def _changed_rows_error(
    files: str, changes: dict[str, tuple[object, object]], rows_then: int, rows_now: int
) -> UserError:
    """Return the error of changed rows: it names changed options, or the files without any."""
    options = [
        f"config.{name}={now!r} (until the checkpoint {then!r})"
        for name, (then, now) in changes.items()
        if name.startswith(_ROW_SECTIONS) and name not in _NOT_OF_ROWS
    ]
    return UserError(
        f"{', '.join(options) or files}: the training data have changed, {rows_then} rows until "
        f"the checkpoint, {rows_now} other or reordered ones now; "
        f"{'set that back' if options else 'restore the files'}, or give another --workdir"
    )


def former_values(saved: dict[str, Any]) -> dict[str, object]:
    """Return the value of each option by its dotted name, from the options of a checkpoint."""
    values = flatten_options(saved)
    # An option that was added after the checkpoint had the value that is now its default.
    return {option.name: values.get(option.name, option.default) for option in all_options()}
