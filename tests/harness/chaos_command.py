"""Run a command of jax_ppo, and announce its phases and the examples that it consumes.

    python tests/harness/chaos_command.py train|sft|reward_model [arguments of the command]

Only announcements are added: `chaos.py` chooses by them when it disturbs the run. Each is one line,
"chaos: phase NAME" or "chaos: step STEP of examples ID ID ...", on the standard output.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from jax_ppo import command

# Each phase begins with a call of one of these functions, by the name under which it is called.
PHASES = {
    "loading": (
        "jax_ppo.training.state:StateBuilder.create",
        "jax_ppo.run.supervised_loop:SupervisedTraining.load_state",
        "jax_ppo.training.checkpoint:Checkpointer.restore",
    ),
    "compiling": ("jax_ppo.runtime.compiled_programs:compile_program",),
    "sampling": (
        "jax_ppo.ppo.samples.on_policy:sample_batch",
        "jax_ppo.ppo.samples.one_step_ahead:sample_batch",
        "jax_ppo.ppo.samples.continued:ContinuedSource.take",
    ),
    "updating": ("jax_ppo.ppo.step:update_state", "jax_ppo.run.supervised_loop:train_step"),
    "checkpointing": ("jax_ppo.training.checkpoint:Checkpointer.save",),
    "evaluating": (
        "jax_ppo.run.ppo_training:evaluate_policy",
        "jax_ppo.run.supervised_loop:SupervisedTraining.evaluate",
    ),
    "exporting": (
        "jax_ppo.run.export:export_checkpoint",
        "jax_ppo.run.export:save_adapters",
        "jax_ppo.run.supervised_loop:export_checkpoint",
    ),
    "finishing": ("jax_ppo.reporting.journal:Journal.write_summary",),
}


def announce(text: str) -> None:
    """Write a line at once: the process may be killed in the next instant."""
    os.write(1, f"chaos: {text}\n".encode())


def wrap(name: str, make_wrapper: Callable[[Callable], Callable]) -> None:
    """Replace a function "module:name" or "module:Class.name" by its wrapper."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, attribute)
    wrapper = make_wrapper(function)

    def call(*arguments: Any, **options: Any) -> Any:
        from jax_ppo.runtime.compiled_programs import runs_on_shapes

        # A step that only compiles its programs is none of the run's.
        return (function if runs_on_shapes() else wrapper)(*arguments, **options)

    setattr(owner, attribute, functools.wraps(function)(call))


def announce_phases() -> None:
    """Announce the phases."""

    def make_wrapper(phase: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            announce(f"phase {phase}")
            return function(*arguments, **options)

        return call

    for phase, names in PHASES.items():
        for name in names:
            wrap(name, functools.partial(make_wrapper, phase))


def announce_examples() -> None:
    """Announce the rows of the training data that each step consumes.

    For partial rollouts, those of each batch that enters the pool.
    """
    placed: list[int] = []

    def announce_rows(step: int, indices: Iterable[int]) -> None:
        announce(f"step {step} of examples {' '.join(map(str, indices))}")

    def wrap_sample_batch(function: Callable) -> Callable:
        def call(run: Any, state: Any, batches: Any, step: int, *arguments: Any, **options: Any):
            sampled = function(run, state, batches, step, *arguments, **options)
            announce_rows(step, sampled.batch.indices)
            return sampled

        return call

    def wrap_begin(function: Callable) -> Callable:
        def call(run: Any, batch: Any, number: int, *arguments: Any) -> Any:
            announce_rows(number, batch.indices)
            return function(run, batch, number, *arguments)

        return call

    def wrap_place_batch(function: Callable) -> Callable:
        def call(run: Any, dataset: Any, batch: Any) -> Any:
            placed[:] = batch.indices
            return function(run, dataset, batch)

        return call

    def wrap_train_step(function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            announce_rows(int(arguments[2]), placed)
            return function(*arguments, **options)

        return call

    for module in ("on_policy", "one_step_ahead"):
        wrap(f"jax_ppo.ppo.samples.{module}:sample_batch", wrap_sample_batch)
    wrap("jax_ppo.ppo.samples.continued:_begin", wrap_begin)
    wrap("jax_ppo.run.supervised_loop:SupervisedTraining.place_batch", wrap_place_batch)
    wrap("jax_ppo.run.supervised_loop:train_step", wrap_train_step)


def announce_when_running(run: Callable) -> Callable:
    """Return a wrapper that announces from its call on, as modules are loaded only then."""

    def call(*arguments: Any) -> Any:
        announce_examples()
        announce_phases()
        return run(*arguments)

    return call


def main(arguments: list[str]) -> None:
    """Run a command; the first argument is its name."""
    command._run = announce_when_running(command._run)
    importlib.import_module(f"jax_ppo.{arguments[0]}").main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
