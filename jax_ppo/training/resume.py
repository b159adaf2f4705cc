"""How far a run has come: what is due then, and whether the options that it is started with again are still its own."""

from collections.abc import Callable, Iterator
from typing import Any

from jax_ppo.config.schema import Config, all_options, option_value
from jax_ppo.errors import UserError
from jax_ppo.training.checkpoint import Checkpointer, Progress


def is_due(done: int, total_steps: int, frequency: int) -> bool:
    """Whether it is time for something that is done every so many steps (0: never) and after the last."""
    return done == total_steps or (frequency > 0 and done % frequency == 0)


def find_progress(
    config: Config,
    total_steps: int,
    checkpoints: Checkpointer,
    report: Callable[[str], None],
    command: str,
) -> Progress:
    """Of the newest checkpoint, if there is one. Raises UserError for one that must not be gone on from.

    Args:
      report: takes a line for the user.
      command: train, sft or reward_model; options that it does not read may change.
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
    _check_same_experiment(config, meta["config"], report, command)
    if latest < total_steps:
        report(f"resuming after step {latest} of {total_steps}")
    else:
        report(
            f"all {total_steps} steps are done: no more is learned; set config.trainer.total_training_steps higher, or "
            "give another --workdir"
        )
    return Progress(latest, meta["position"], meta["evaluations"])


def _check_same_experiment(
    config: Config, saved: dict[str, Any], report: Callable[[str], None], command: str
) -> None:
    """Report which options differ from the checkpoint's.

    Raises:
      UserError: An option has changed that is fixed for the length of a run.
    """
    saved_values = dict(_flatten(saved))
    for option in all_options():
        now = option_value(config, option.name)
        # An option that was added after the checkpoint had the value that is now its default.
        then = saved_values.get(option.name, option.default)
        if now == then:
            continue
        if option.facts.fixed_on_resume and command in option.read_by:
            raise UserError(
                f"config.{option.name}={now!r}: the work directory holds checkpoints of another "
                f"experiment, with {then!r}; give another --workdir"
            )
        if option.facts.first_step_only:
            report(
                f"config.{option.name}={now!r}: not read; what the checkpoint made of {then!r} is kept"
            )
        else:
            report(
                f"config.{option.name} was {then!r} until the checkpoint, and is {now!r} from here on"
            )


def _flatten(options: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
