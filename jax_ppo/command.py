"""Steps shared by all commands: read the options, start the processes, report errors in one line.

Nothing heavy is imported before the options have been validated, so a mistake is reported within a
second.
"""

import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import pkgutil
import signal
import time
import traceback
from collections.abc import Container, Iterator
from pathlib import Path

from jax_ppo.config import command_line, parsing
from jax_ppo.config.schema import Config, flatten_options, replace_options
from jax_ppo.errors import UserError, exit_on_user_error, print_any_text
from jax_ppo.runtime import signals

# What runs a command, given its options and the folder to write to; imported once they are valid.
RUNNERS = {
    "train": "jax_ppo.run.ppo_training:train_ppo",
    "critic": "jax_ppo.run.ppo_training:train_ppo",
    "evaluate": "jax_ppo.run.standalone_evaluation:evaluate_model",
    "score": "jax_ppo.run.token_scores:score_file",
    "sft": "jax_ppo.run.supervised_loop:train_sft",
    "reward_model": "jax_ppo.run.supervised_loop:train_reward_model",
}


def run_command(arguments: list[str], command: str) -> None:
    """Run one of `RUNNERS` with `sys.argv`; exit with a one-line message on a user error."""
    # Installed first, so that a signal ends the command in one line even while modules are loaded.
    with signals.handle_stop_signals(ends_process=True):
        with exit_on_user_error():
            options, workdir = command_line.read_command_line(arguments, command)
            _, _, typed = command_line.read_arguments(arguments[1:])
            if command == "score":
                from jax_ppo.data.response_rows import find_response_files
                from jax_ppo.storage.local_files import expand_local_path

                option = "config.score.file"
                find_response_files(expand_local_path(options.score.file, option), option)
            from jax_ppo.runtime import backends

            backends.require_settings()
            from jax_ppo.runtime import distributed, faults

            distributed.initialize(options.distributed)
        try:
            faults.run_or_abort(lambda: _run(command, options, workdir, typed))
        finally:
            # While Python exits, Ctrl-C would print a traceback of a library's exit handler.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def prepared_run(
    options: Config, workdir: str | Path, evaluates: bool = False, typed: Container[str] = ()
) -> Iterator[tuple[Config, Path]]:
    """Prepare a run in the block, which has exclusive use of the work directory.

    Prepare the compilation cache, write the resolved options to the work directory, a folder or a
    gs:// address, and yield them with the local folder to write to. With `evaluates`, refuse one
    that has checkpoints: an evaluation would replace the records of their run. Options that are
    `typed` are printed first.

    Raises:
      UserError: JAX finds no devices, the work directory cannot be used, or its disk is full. Also
        during the block.
      SystemExit: at the end, if SIGTERM (code 143) or a command's SIGINT (130) stopped the run.
      KeyboardInterrupt: if SIGINT stopped the run, outside of a command.
    """
    from jax_ppo.reporting import console, sinks
    from jax_ppo.runtime import (
        backends,
        compiled_programs,
        devices,
        distributed,
        heartbeat,
        work_directory,
    )

    sinks.require_installed(parsing.parse_names(options.trainer.logger))
    print_any_text()  # also of a script that calls the Python API
    backends.start_backends()
    compiled_programs.enable_cache(options.trainer.compilation_cache, console.print_on_main)
    workdir = command_line.read_workdir(workdir)
    values = flatten_options(dataclasses.asdict(options)).items()
    common = {f"config.{name}": x for name, x in values if not name.startswith("distributed.")}
    distributed.require_equal(common, "options")
    if evaluates:  # before the folder is opened: a run that writes to a bucket would end
        distributed.run_on_main(lambda: work_directory.refuse_checkpoints(workdir))
    folder = Path()
    try:
        with (
            signals.handle_stop_signals(ends_process=False),
            work_directory.open_work_directory(workdir, console.print_on_main) as folder,
        ):
            model, chosen_dtype = devices.resolve_dtype_here(options.model)
            date = options.data.date or _run_date(options.model.path, folder, evaluates)
            [date, *_] = distributed.allgather_json(date)
            resolved = replace_options(options, {"model": model, "data.date": date})

            def write_options() -> None:
                # A run's own stay until its resume is accepted; `Journal` writes them then.
                if not work_directory.has_checkpoints(folder):
                    command_line.write_config(dataclasses.asdict(resolved), folder)
                print(time.strftime(f"%Y-%m-%d %H:%M:%S %Z: {chosen_dtype}"))
                print(f"work directory: {workdir} (all options: config.json)")
                command_line.print_set_options(dataclasses.asdict(options), typed)

            distributed.run_on_main(write_options)
            beating: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if distributed.is_main():
                beating = heartbeat.beating(console.print_aside)
            with beating:
                yield resolved, folder
            signals.raise_if_stopped(console.print_on_main)
    except OSError as error:
        if explained := _explain_write_error(error, folder, workdir):
            raise explained from error
        raise


def _run_date(model_path: str, folder: Path, evaluates: bool) -> str:
    """Return the date of the first start of this, or the evaluated, run; or today's."""
    from jax_ppo.runtime import work_directory
    from jax_ppo.storage.local_files import expand_local_path

    path = expand_local_path(model_path, "config.model.path")
    runs = [folder] if work_directory.has_checkpoints(folder) else []
    if evaluates:
        runs = [path, path.parent, path.parent.parent]
    for run in runs:
        # A model's file has no `data`; that of another program may hold anything.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return str(json.loads((run / "config.json").read_text())["data"].get("date", ""))
    return datetime.date.today().isoformat()


def _explain_write_error(error: OSError, folder: Path, workdir: str | Path) -> UserError | None:
    """Return what to do about a file of the run that could not be written; `None` for others."""
    from jax_ppo.storage import local_files

    # It may be bytes, or the number of an open file, in functions of the user.
    path = Path(error.filename if isinstance(error.filename, str | os.PathLike) else "")
    written = path.name or "a file of the run"
    if local_files.is_disk_full(error):
        return local_files.disk_full_error(folder, written)
    if not path.name or folder.absolute() not in path.absolute().parents:
        return None
    return UserError(
        f"--workdir={workdir}: {written} cannot be written or read: {error.strerror}; restore the "
        "folder or its permissions, then the same command continues from its newest checkpoint"
    )


def _run(command: str, options: Config, workdir: str | Path, typed: Container[str]) -> None:
    from jax_ppo.runtime import faults, heartbeat

    limited = faults.limit_stalls(options.distributed.stall_seconds)
    prepared = prepared_run(options, workdir, command in ("evaluate", "score"), typed)
    with exit_on_user_error(), limited, prepared as (resolved, folder):
        try:
            with heartbeat.activity("loading modules"):
                run = pkgutil.resolve_name(RUNNERS[command])
            run(resolved, folder)
        # A user's function raised it: as the end of a run, the others would wait for this process.
        except (KeyboardInterrupt, SystemExit) as error:
            if signals.received_signal() is not None:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{error!r} was raised at {frame.filename}:{frame.lineno}, not by a signal"
            ) from error
