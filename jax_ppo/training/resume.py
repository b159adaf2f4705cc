"""How far a run has come: what is due then, and whether the options that it is started with again are still its own."""

import dataclasses
from collections.abc import Callable

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.training.checkpoint import Checkpointer, Progress


def due(done: int, total_steps: int, frequency: int) -> bool:
    """Whether it is time for something that is done every so many steps (0: never) and after the last."""
    return done == total_steps or (frequency > 0 and done % frequency == 0)


def find_progress(
    config: Config,
    total_steps: int,
    checkpoints: Checkpointer,
    report: Callable[[str], None],
    another: tuple[str, ...],
    kept: tuple[str, ...] = (),
) -> Progress:
    """Of the newest checkpoint, if there is one. Raises UserError for one that must not be gone on from.

    Args:
      report: takes a line for the user.
      another: options that make it another experiment where they change, besides those of the model.
      kept: options that the first step alone reads.
    """
    latest = checkpoints.latest_step()
    if latest is None:
        return Progress()
    if not config.trainer.resume:
        raise UserError(
            f"config.trainer.resume=False: the work directory holds a checkpoint after step {latest}; give "
            "another --workdir, or remove it"
        )
    _, meta = checkpoints.restore(latest, {})
    _check_same_experiment(config, meta["config"], report, another, kept)
    if latest < total_steps:
        report(f"resuming after step {latest} of {total_steps}")
    else:
        report(
            f"all {total_steps} steps are done: no more is learned; set config.trainer.total_training_steps higher, or "
            "give another --workdir"
        )
    return Progress(latest, meta["position"], meta["evaluations"])


def _check_same_experiment(config: Config, saved: dict, report, another, kept) -> None:
    """Says which options differ from the checkpoint's; raises UserError for those that make it another experiment."""
    # An option that is younger than the checkpoint had the value that is now its default.
    default, now, then = (
        dict(_flatten(options))
        for options in (dataclasses.asdict(Config()), dataclasses.asdict(config), saved)
    )
    then = default | then
    changed = [name for name in now if now[name] != then[name]]
    for name in changed:
        if name.startswith("model.") or name in another:
            raise UserError(
                f"config.{name}={now[name]!r}: the work directory holds checkpoints of another experiment, with "
                f"{then[name]!r}; give another --workdir"
            )
        if name in kept:
            report(
                f"config.{name}={now[name]!r}: not read; what the checkpoint made of {then[name]!r} goes on"
            )
        else:
            report(
                f"config.{name} was {then[name]!r} until the checkpoint, and is {now[name]!r} from here on"
            )


def _flatten(options: dict, prefix: str = ""):
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
