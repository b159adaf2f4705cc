"""Memory of each program as the machine's own compiler states it."""

import collections
import dataclasses
import re
import sys
import time
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.errors import UserError
from jax_ppo.memory.abstract_step import AbstractStep
from jax_ppo.memory.memory_estimate import ProgramMemory, resident_memory
from jax_ppo.ppo import programs
from jax_ppo.ppo.programs import StepProgram, find_step_program, planned_programs
from jax_ppo.runtime import meshes, sharding
from jax_ppo.runtime.compiled_programs import output_shapes, run_on_shapes
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.types import Params

# What a compiler reports if a program does not fit: the total, or the temporaries alone.
_ALL_MEMORY = re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm")
_TEMPORARIES = re.compile(r"required for HLO temporaries \(([\d.]+)([KMG])\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def measure_programs(
    step: AbstractStep, compiled: dict[Any, Any]
) -> tuple[dict[str, ProgramMemory], set[str]]:
    """Compile the programs of a step, by taking it on shapes; print a line for each to stderr.

    Return the bytes per device of each program by name, and the programs that the compiler refused,
    whose temporaries may include what they replace. `compiled` keeps them for steps of other sizes.
    Raise `UserError` if one failed for another reason than memory.
    """
    recorder = _Recorder(step.mesh, step.decoding_weights, compiled)
    with run_on_shapes(recorder):
        programs.take_step_on_shapes(step, step.state, step.batches())
    # Arrays with a separate column, by identity: programs get the shapes that others returned.
    copies = [program.results for program in recorder.programs["prepare_weights"]]
    counted = {id(x) for x in jax.tree.leaves((step.state, copies))}
    measured: dict[str, ProgramMemory] = {}
    refused = set()
    for program in planned_programs(step):
        largest = max(recorder.programs[program.name], key=lambda x: x.temporary_bytes)
        if largest.is_refused:
            refused.add(program.name)
        measured[program.name] = _measure_program(step, program, largest, counted)
    return measured, refused


@dataclasses.dataclass
class _ProgramFigures:
    """A compiled program: leaves of its arguments, shapes of its results, bytes per device."""

    arguments: list[Any]
    results: Any
    new_result_bytes: int
    temporary_bytes: int
    is_refused: bool


@dataclasses.dataclass
class _Recorder:
    """Compiles programs and records the memory that they need."""

    mesh: Mesh
    decoding_weights: Params
    compiled: dict[Any, Any]  # `_ProgramFigures` by name and text of the program

    def __post_init__(self) -> None:
        # By name. Small programs that prepare arguments count for the program that reads them.
        self.programs = collections.defaultdict[str, list[_ProgramFigures]](list)
        self._small: list[_ProgramFigures] = []

    def __call__(self, name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        leaves = [x for x in jax.tree.leaves(arguments) if hasattr(x, "sharding")]
        key = (name, lowered.as_text())
        if key not in self.compiled:
            started_at = time.monotonic()
            self.compiled[key] = self._compile(lowered, leaves)
            if name:
                label, seconds = find_step_program(name).label, time.monotonic() - started_at
                print(f"compiled {label}: {seconds:.1f} s", file=sys.stderr, flush=True)
        program = dataclasses.replace(self.compiled[key], arguments=leaves)
        self._small.append(program)
        if name:
            self.programs[name] += self._small
            self._small = []
        return program.results

    def _compile(self, lowered: jax.stages.Lowered, leaves: list[Any]) -> _ProgramFigures:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            temporary_bytes = _refused_bytes(str(error), leaves)
            return _ProgramFigures(
                leaves, self._lay_out(lowered.out_info), 0, temporary_bytes, is_refused=True
            )
        memory = compiled.memory_analysis()
        assert memory is not None, "all of JAX's compilers state the memory of programs"
        new_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
        shapes = output_shapes(lowered, compiled)
        return _ProgramFigures(leaves, shapes, new_bytes, memory.temp_size_in_bytes, False)

    def _lay_out(self, results: Any) -> Any:
        """Return results with shardings, since a refused program has not chosen any."""
        structure = jax.tree.structure(results)
        weights = self.decoding_weights
        others = {name: x for name, x in weights.items() if not name.startswith("layer_")}
        for part in (others, weights["layer_0"]):
            # A program that lays weights out for decoding also returns the index of a layer.
            laid_out = (part, jax.ShapeDtypeStruct((), "int32"))
            if structure == jax.tree.structure(laid_out):  # type: ignore[operator]
                return laid_out
        parts = meshes.row_shards(self.mesh)

        def lay_out(x: Any) -> jax.ShapeDtypeStruct:
            layout = sharding.replicated(self.mesh)
            if x.ndim > 0 and x.shape[0] % parts == 0:
                layout = sharding.rows(self.mesh)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

        return jax.tree.map(lay_out, results)


def _refused_bytes(message: str, arguments: list[Any]) -> int:
    """Return the bytes of temporaries in a compiler's error; raise `UserError` if it has none."""
    total = _ALL_MEMORY.search(message)
    found = total or _TEMPORARIES.search(message)
    if found is None:
        raise UserError(f"the compiler failed: {message}")
    used = int(float(found[1]) * _UNITS[found[2]])
    return max(0, used - bytes_per_device(arguments) if total else used)


def _measure_program(
    step: AbstractStep, program: StepProgram, compiled: _ProgramFigures, counted: set[int]
) -> ProgramMemory:
    batch = bytes_per_device([x for x in compiled.arguments if id(x) not in counted])
    resident = resident_memory(step, program)
    if program.kind != "resharding":  # the decoding copy has a separate column
        batch += compiled.new_result_bytes
        if step.is_separate:
            # Sampling gets other shapes of the copy than the programs that make it returned.
            batch -= resident.decoding_copy
    # The compiler may share the memory of these with what is needed before or after.
    gradients = min(resident.gradients, compiled.temporary_bytes)
    cache = min(resident.cache, compiled.temporary_bytes - gradients)
    return dataclasses.replace(
        resident,
        gradients=gradients,
        cache=cache,
        batch=max(0, batch),
        temporaries=compiled.temporary_bytes - gradients - cache,
    )
