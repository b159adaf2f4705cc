"""Compiled programs: declared once, run on arrays or shapes, kept on disk, and counted.

On arrays a program is a jitted function. Inside `run_on_shapes` it takes `jax.ShapeDtypeStruct`
with shardings: it is compiled, which JAX remembers, and returns the shapes of its results. So the
code that runs a step also compiles it, in a thread or for a machine that is not there.
"""

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.monitoring

from jax_ppo.runtime import faults, heartbeat
from jax_ppo.storage import downloads

COMPILED = "/jax/core/compile/backend_compile_duration"  # compiled, or read from the cache

P = ParamSpec("P")
R = TypeVar("R")
# Compiles the lowered program of this name for its arguments, and returns its results' shapes.
Compile = Callable[[str, jax.stages.Lowered, tuple[Any, ...]], Any]
# The compiling function and the shapes of results so far, inside `run_on_shapes`.
_shape_run: ContextVar[tuple[Compile, dict[Hashable, Any]] | None] = ContextVar(
    "shape_run", default=None
)


class CompiledProgram(Generic[P, R]):
    """A jitted function that also takes shapes."""

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(
        self, function: Callable[P, R], name: str | Callable[..., str] = "", **jit_options: Any
    ) -> None:
        """Declare a program; `jit_options` are those of `jax.jit`.

        `name` is its name in the table of a step's programs (`ppo.programs.PROGRAMS`), or returns
        it for the program's arguments; empty for a small one that prepares another's arguments.
        """
        self._name = name
        self.jitted = jax.jit(function, **jit_options)
        named = function.func if isinstance(function, functools.partial) else function
        functools.update_wrapper(self, named)
        self.__wrapped__ = function

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Run on arrays; on shapes, inside `run_on_shapes`, compile and return results' shapes."""
        run = _shape_run.get()
        if run is None:
            return self.jitted(*arguments, **named)
        compile_, results = run
        leaves, structure = jax.tree.flatten((arguments, named))
        # Shapes are equal if their shardings are; all other leaves are static arguments.
        key = (self, structure, *leaves)
        if key not in results:
            token = _shape_run.set(None)  # a function that is traced calls others on tracers
            try:
                name = self._name(*arguments, **named) if callable(self._name) else self._name
                words = name or self.__name__
                for word, meaning in _WORDS.items():
                    words = words.replace(word, meaning)
                with heartbeat.activity(f"compiling {words.strip()}"):
                    lowered = self.lower(*arguments, **named)
                    results[key] = compile_(name, lowered, arguments)
            finally:
                _shape_run.reset(token)
        return results[key]

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Return the program lowered for arrays or shapes."""
        return self.jitted.lower(*arguments, **named)


def program(
    name: str | Callable[..., str] = "", **jit_options: Any
) -> Callable[[Callable[P, R]], CompiledProgram[P, R]]:
    """Return a decorator that makes a function a `CompiledProgram`."""
    return lambda function: CompiledProgram(function, name, **jit_options)


# On the console, parts of the names of programs are words.
_WORDS = {"update_": "the update of the ", "forward_": "the forward pass of the ", "_": " "}
# Options of `jax.jit` with which programs round what they have in common alike. By default XLA
# rounds a bfloat16 where a program stores it, not where it is only passed on.
ROUNDED_ALIKE = {"compiler_options": {"xla_allow_excess_precision": False}}


def compile_program(name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
    """Compile a program; a `Compile`."""
    return output_shapes(lowered, lowered.compile())


def output_shapes(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Any:
    """Return the tree of `jax.ShapeDtypeStruct` with shardings of a program's outputs."""
    # Compiling, not lowering, decides the layout of outputs.
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        compiled.output_shardings,
    )


@contextlib.contextmanager
def run_on_shapes(compile_: Compile = compile_program) -> Iterator[None]:
    """Make programs take shapes while the context is open, and `placement.place` return them.

    `compile_` compiles each once for each kind of arguments. Other threads still run on arrays.
    """
    token = _shape_run.set((compile_, {}))
    try:
        yield
    finally:
        _shape_run.reset(token)


def runs_on_shapes() -> bool:
    """Return whether programs take shapes here."""
    return _shape_run.get() is not None


def enable_cache(option: str, report: Callable[[str], None]) -> None:
    """Make JAX keep compiled programs on disk, and look for them there before it compiles.

    Call it before any computation. Several processes, of one run or of several, may use one folder,
    and no entry is ever out of date. `option` is config.trainer.compilation_cache; `report` is
    called with a line if the folder cannot be written: the run continues without it.
    """
    # The option comes first, then JAX's own variable, then the user's cache folder.
    own_folder = str(downloads.cache_folder("compiled"))
    folder = option or os.environ.get("JAX_COMPILATION_CACHE_DIR") or own_folder
    if folder == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "://" not in folder:
        folder = os.path.expanduser(folder)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # That the folder exists is not enough: it may be read-only.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            report(
                "note: compiled programs are not kept, each run compiles anew "
                f"(config.trainer.compilation_cache): {error}"
            )
            jax.config.update("jax_enable_compilation_cache", False)
            return
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX's own thresholds skip what compiles within a second: a run has many such programs.
    for name, value in (
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        # A threshold that the user has set in the environment is kept.
        if name.upper() not in os.environ:
            jax.config.update(name, value)


@dataclasses.dataclass
class Compilations:
    """Counts of the programs compiled so far."""

    programs: int = 0  # compiled or read from the cache
    seconds: float = 0.0  # compiling and reading, summed over threads


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count every program that JAX compiles while the context is open."""
    count = Compilations()

    def add_program(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            faults.report_progress()
            count.programs += 1
            count.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add_program)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(add_program)
