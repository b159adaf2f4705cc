"""Steps shared by all commands: read the options, start the processes, report errors in one line.

Nothing heavy is imported before the options have been validated, so a mistake is reported within a
second.
"""

import atexit
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jax_ppo.config import command_line, parsing
from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError, print_any_text
from jax_ppo.runtime import signals


def run_command(
    arguments: list[str],
    command: str,
    run: Callable[[Config, Path], object],
    validate: Callable[[Config], None] = lambda options: None,
) -> None:
    """Read the options of a command and run it; exit with a one-line message on a user error.

    Args:
      arguments: `sys.argv`.
      command: "train", "critic", "evaluate", "score", "sft" or "reward_model".
      run: takes the options and the folder to write to; imports heavy modules itself.
      validate: raises `UserError` for options that do not fit the machine, before JAX is loaded.
    """
    print_any_text()
    # Installed first, so that a signal ends the command in one line even while modules are loaded.
    with signals.handle_stop_signals(ends_process=True):
        try:
            options, workdir = command_line.read_command_line(arguments, command)
            validate(options)
            from jax_ppo.runtime import distributed, xla_flags

            xla_flags.require_known()
            distributed.initialize(options.distributed)
        except UserError as error:
            sys.exit(f"error: {error}")
        try:
            distributed.run_or_abort(lambda: _run(options, workdir, run, command))
        finally:
            # While Python exits, Ctrl-C would print a traceback of a library's exit handler.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def prepared_run(
    options: Config, workdir: str | Path, evaluates: bool = False
) -> Iterator[tuple[Config, Path]]:
    """Prepare a run in the block, which has exclusive use of the work directory.

    Prepare the compilation cache and write the resolved options to the work directory.

    Args:
      options: the options.
      workdir: a folder or a gs:// address.
      evaluates: refuse a work directory that has checkpoints: an evaluation would replace the
        records of their run.

    Yields:
      The options with what depends on the machine resolved; and the folder to write to: the work
      directory, or a local folder that stands for its address.

    Raises:
      UserError: JAX finds no devices, the work directory cannot be used, or its disk is full.
      SystemExit: at the end of the block, if SIGTERM stopped the run: with code 143, and in a
        command with code 130 for SIGINT.
      KeyboardInterrupt: if SIGINT stopped the run, outside of a command.
    """
    from jax_ppo.reporting import console, trackers
    from jax_ppo.runtime import (
        backends,
        compilation,
        computation_dtype,
        distributed,
        heartbeat,
        work_directory,
    )
    from jax_ppo.storage import disk_space

    trackers.require_installed(parsing.parse_loggers(options.trainer.logger))
    print_any_text()  # also of a script that calls the Python API
    backends.start_backends()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # torch is not needed
    compilation.enable_cache(options.trainer.compilation_cache, console.print_on_main)
    workdir = work_directory.validated(workdir)
    folder = Path()
    try:
        with (
            signals.handle_stop_signals(ends_process=False),
            work_directory.open_work_directory(workdir, console.print_on_main) as folder,
        ):
            if evaluates:
                distributed.run_on_main(lambda: work_directory.refuse_checkpoints(folder, workdir))
            resolved, chosen_dtype = computation_dtype.resolve_dtype_here(options)

            def write_options() -> None:
                # A run's own stay until its resume is accepted; `Journal` writes them then.
                if not work_directory.has_checkpoints(folder):
                    command_line.write_config(resolved, folder)
                command_line.print_set_options(options, str(workdir), chosen_dtype)

            distributed.run_on_main(write_options)
            beating: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if distributed.is_main():
                beating = heartbeat.beating(console.print_aside)
            with beating:
                yield resolved, folder
            signals.raise_if_stopped(console.print_on_main)
    except OSError as error:
        if not disk_space.is_disk_full(error):
            raise
        written = "a file of the run"
        if error.filename:
            written = Path(error.filename).name
        raise disk_space.disk_full_error(folder, written, cause=error) from error


def _run(
    options: Config,
    workdir: str | Path,
    run: Callable[[Config, Path], object],
    command: str,
) -> None:
    from jax_ppo.reporting import console
    from jax_ppo.runtime import distributed, watchdog

    evaluates = command in ("evaluate", "score")
    watched = watchdog.watch(options.distributed.stall_seconds, distributed.end_stalled_run)
    try:
        with watched, prepared_run(options, workdir, evaluates) as (resolved, folder):
            run(resolved, folder)
            console.print_on_main(f"report: {workdir}/report.html")
            if command != "score" and "tensorboard" in parsing.parse_loggers(
                options.trainer.logger
            ):
                console.print_on_main(describe_curves(workdir))
    except UserError as error:
        sys.exit(f"error: {error}")


def describe_curves(workdir: str | Path) -> str:
    """Return the line that says how to see the curves."""
    line = f"curves: tensorboard --logdir {workdir}/tensorboard"
    # Event files are written without it: with its server it takes 50 MB.
    if importlib.util.find_spec("tensorboard") is None:
        line += "  (after: pip install tensorboard)"
    return line
