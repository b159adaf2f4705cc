"""A step of a run, computed again from its checkpoint and compared with the hashes of the run."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config import loading
from jax_ppo.config.schema import Config, Distributed, replace_options
from jax_ppo.errors import UserError
from jax_ppo.models.hf.json_files import read_json_object
from jax_ppo.reporting import console
from jax_ppo.reporting.files import collect_versions
from jax_ppo.run.life_cycle import Training
from jax_ppo.runtime import compilation, distributed, meshes, work_directory
from jax_ppo.storage import remote, staging
from jax_ppo.training.checkpoint import META, Checkpointer
from jax_ppo.training.progress import Progress, progress_to_repeat
from jax_ppo.training.step_hashes import (
    HASHES_FILE,
    QUANTITIES,
    find_difference,
    hash_options,
    read_hashes,
)

Options = dict[str, Any]  # sections of options, as config.json holds them


def read_run(source: Path, step: int, where: dict[str, Any]) -> tuple[Config, str]:
    """Return the options by which a step is computed again, and the command that computed it.

    `step` counts from 1; `where` has options of the mesh and of the processes, by dotted name, in
    place of the run's.

    Raises:
      UserError: the folder holds no run that wrote hashes, or not of this step; or a resume changed
        the options after the newest checkpoint before the step.
    """
    if remote.is_address(str(source)):
        raise UserError(f"--workdir={source}: expected a folder of this machine; download the run")
    if not (source / "config.json").exists():
        raise UserError(f"--workdir={source}: holds no run: there is no config.json")
    recorded = read_hashes(source)
    if not recorded:
        raise UserError(
            f"--workdir={source}: the run has written no {HASHES_FILE}, which says what a step "
            "must give; runs of older versions have none"
        )
    for number in _steps(source, step):
        if number not in recorded:
            without = f", without {number}" if min(recorded) < number < max(recorded) else ""
            raise UserError(
                f"--step={step}: the run has recorded the steps {min(recorded)} to {max(recorded)}"
                f"{without}"
            )
        if recorded[number]["options"] != recorded.get(step, recorded[number])["options"]:
            raise UserError(
                f"--step={step}: step {number} was computed with other options, and no checkpoint "
                "between the two is left"
            )
    command = recorded[step]["command"]
    options = _find_options(source, recorded[step]["options"])
    if options.get("trainer", {}).get("critic_only"):
        command = "critic"
    # Processes have other addresses now; the environment tells them, or `where`.
    options = options | {"distributed": dataclasses.asdict(Distributed())}
    for name, value in where.items():
        section, _, option = name.partition(".")
        options = options | {section: options.get(section, {}) | {option: value}}
    config = loading.from_config_dict(options, command)
    # A model that the run made for itself is in its folder.
    path = config.model.path or str(source / work_directory.WARM_UP_MODEL)
    values = {
        "model.path": path,
        # It only takes steps, and writes all their responses.
        "trainer.export": False,
        "trainer.log_rollouts_freq": 1,
        "trainer.log_rollouts": config.samples_per_step,
        "trainer.logger": "",
        "trainer.plot_freq": 0,
    }
    return replace_options(config, values), command


def repeat_steps(
    config: Config,
    folder: Path,
    build: Callable[[Mesh], Training],
    best_metric: str,
    *,
    source: Path,
    step: int,
    verifies: bool,
) -> dict[str, Any]:
    """Take steps of a run again, in the place of `life_cycle.run_life_cycle`, up to a step from 1.

    `source` is the work directory of the run, which stays as it is. With `verifies`, compare the
    hashes of all steps that are taken.

    Raises:
      UserError: a hash differs, or the data or the models of the run have changed.
    """
    steps = _steps(source, step)
    start = steps[0] - 1
    directory = source / staging.CHECKPOINTS
    mesh = meshes.make_mesh(config.mesh, decoding=config.rollout.mesh.devices)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        compiled = stack.enter_context(compilation.count_compilations())
        # A run that has not saved yet has no folder, and it stays without.
        checkpoints = stack.enter_context(
            Checkpointer(
                directory if start else folder / staging.CHECKPOINTS,
                best_metric=best_metric,
                read_only=bool(start),
            )
        )
        training = build(mesh)
        progress = Progress()
        if start:
            meta = checkpoints.restore(start, {}).meta
            progress = progress_to_repeat(start, meta, **training.fingerprints())
        origin = f"checkpoint {start}" if start else "the start of the run"
        console.print_on_main(f"computing step {step} from {origin}")
        stack.enter_context(training.running())
        journal = stack.enter_context(training.open_journal(folder, progress, compiled))
        state = training.load_state(checkpoints, start)
        state = training.prepare_first_step(state, checkpoints, progress)
        for number in steps:
            state = training.take_step(state, number - 1, journal)
        journal.write_pending_report()
        summary = journal.write_summary(step, mesh)
    if verifies:
        distributed.run_on_main(lambda: _compare(source, folder, steps))
    return summary


def _steps(source: Path, step: int) -> range:
    """Return the steps to take: those after the newest checkpoint before a step, and this one."""
    return range(max((s for s in _saved_steps(source) if s < step), default=0) + 1, step + 1)


def _saved_steps(source: Path) -> list[int]:
    """Return the steps of a run's checkpoints; damaged ones have other names."""
    folder = source / staging.CHECKPOINTS
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def _find_options(source: Path, wanted: str) -> Options:
    """Return the run's or a checkpoint's options with a hash; raise `UserError` without any."""
    newest: Options = read_json_object(source / "config.json")
    if hash_options(newest) == wanted:
        return newest
    for step in _saved_steps(source):
        meta = source / staging.CHECKPOINTS / str(step) / META / "metadata"
        options: Options = read_json_object(meta)["config"]
        if hash_options(options) == wanted:
            return options
    raise UserError(
        f"--workdir={source}: neither config.json nor a checkpoint has the options of this step"
    )


def _compare(source: Path, folder: Path, steps: range) -> None:
    """Compare the hashes of steps; raise `UserError` at the first quantity that differs."""
    recorded, computed = read_hashes(source), read_hashes(folder)
    then = recorded[steps[-1]]["versions"]
    for name, value in collect_versions().items():
        if then.get(name) != value:
            print(f"note: {name} was {then.get(name)} in the run, and is {value} here")
    for step in steps:
        ours, theirs = computed[step]["hashes"], recorded[step]["hashes"]
        differing = find_difference(theirs, ours)
        if differing is not None:
            meaning = QUANTITIES[differing.partition("/")[0]]
            raise UserError(
                f"step {step}: {differing} ({meaning}) differs: hash "
                f"{theirs.get(differing, 'absent')} in the run, {ours.get(differing, 'absent')} "
                "here"
            )
    names = ", ".join(recorded[steps[-1]]["hashes"])
    verified = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    print(f"verified {verified}: equal in {names}")
