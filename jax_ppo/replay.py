"""Replay: `python -m jax_ppo.replay --workdir=RUN --step=N [--verify]`.

Computes step N of a run again, from the newest checkpoint before it and with the run's own options.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from jax_ppo import command
from jax_ppo.config import loading
from jax_ppo.errors import UserError, did_you_mean, print_any_text
from jax_ppo.storage.paths import expand_local_path

USAGE = """\
usage: python -m jax_ppo.replay --workdir=RUN --step=N [--verify]
           [--config.mesh.AXIS=DEVICES ...] [--config.distributed.OPTION=VALUE ...]

--workdir  the folder of a run of train, critic, sft or reward_model; nothing in it is changed
--step     the step, from 1
--verify   compare each step that is computed with the hashes that the run wrote; exit with code 1
           at the first that differs

The steps after the newest checkpoint before N are computed again, with the run's own options, on
the mesh of the run unless another is given. Responses, metrics and hashes of these steps are
written to the folder RUN-replay-N.
"""
OWN = ("--workdir", "--step", "--verify")
MOVABLE = ("mesh.", "distributed.")  # options that say where a step is computed


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    print_any_text()
    if len(arguments) < 2 or {"--help", "-h", "-help"} & set(arguments[1:]):
        print(USAGE, end="")
        return
    command.run_job(lambda: _make_job(*read_replay_arguments(arguments)))


def read_replay_arguments(arguments: list[str]) -> tuple[Path, int, bool, dict[str, Any]]:
    """Return a run's folder, the step, whether to verify it, and options of where it runs.

    Raise `UserError` for wrong ones, and for options of anything else.
    """
    values, where = {}, {}
    for word in arguments[1:]:
        name, equals, value = word.partition("=")
        option = name.removeprefix("--config.")
        if name.startswith("--config.") and option.startswith(MOVABLE):
            where[option] = loading.parse_option(option, value)
        elif name.startswith("--config"):
            raise UserError(
                f"{word}: a step is computed with the options of its run; only config.mesh and "
                "config.distributed may be given"
            )
        elif name not in OWN or (name == "--verify") == bool(equals):
            hint = did_you_mean(name, OWN)
            raise UserError(f"{word}: expected --workdir=RUN, --step=N or --verify.{hint}")
        else:
            values[name] = value
    for name in ("--workdir", "--step"):
        if name not in values:
            raise UserError(f"{name}: must be given")
    if not values["--step"].isdecimal() or int(values["--step"]) < 1:
        raise UserError(f"--step={values['--step']}: expected the number of a step, from 1")
    source = expand_local_path(values["--workdir"], "--workdir")
    return source, int(values["--step"]), "--verify" in values, where


def _make_job(source: Path, step: int, verifies: bool, where: dict[str, Any]) -> command.Job:
    from jax_ppo.run import replay

    cycle = functools.partial(replay.repeat_steps, source=source, step=step, verifies=verifies)
    options, trained_by = replay.read_run(source, step, where)
    return command.Job(
        options=options,
        workdir=source.with_name(f"{source.resolve().name}-replay-{step}"),
        runner=command.RUNNERS[trained_by],
        arguments={"cycle": cycle},
    )


if __name__ == "__main__":
    main(sys.argv)
