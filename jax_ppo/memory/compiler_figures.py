"""Memory of each program as the machine's own compiler states it."""

import dataclasses
import re
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.errors import UserError
from jax_ppo.memory.abstract_step import AbstractStep
from jax_ppo.memory.memory_estimate import ProgramMemory, resident_memory
from jax_ppo.ppo.programs import compile_programs, find_step_program
from jax_ppo.runtime import compilation, meshes, sharding
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.types import Params

# What a compiler reports if a program needs more memory than the device has: the total, or the
# temporaries alone.
_ALL_MEMORY = re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm")
_TEMPORARIES = re.compile(r"required for HLO temporaries \(([\d.]+)([KMG])\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def measure_programs(step: AbstractStep) -> tuple[dict[str, ProgramMemory], set[str]]:
    """Compile the programs of a step.

    Returns:
      The bytes per device of each program by its name, and the names of the programs that
      the compiler refused, whose temporaries it may count with the arrays that they replace.

    Raises:
      UserError: the compiler failed for another reason than memory.
    """
    recorder = _Recorder(step.mesh, step.decoding_weights)
    # Arrays that have a separate column, by identity: each program gets the shapes that the one
    # before it returned. Kept here, since another array may get the identity of a deleted one.
    counted = {id(x): x for x in jax.tree.leaves(step.state)}
    measured: dict[str, ProgramMemory] = {}
    refused = set()
    names = compile_programs(step, step.state, step.prompts, step.key, step.packed)
    with jax.set_mesh(step.mesh), compilation.compile_programs_with(recorder):
        for name in names:
            kind = find_step_program(name).kind
            compiled = recorder.take()
            # Small programs that prepare arguments count for the program that reads the arguments.
            largest = max(compiled, key=lambda program: program.temporary_bytes)
            if kind == "resharding":
                counted |= {id(x): x for program in compiled for x in program.results}
            if largest.is_refused:
                refused.add(name)
            measured[name] = _measure_program(step, name, largest, counted)
    return measured, refused


@dataclasses.dataclass
class _CompiledProgram:
    """A compiled program: the leaves of its arguments and results, and bytes per device."""

    arguments: list[Any]
    results: list[Any]
    new_result_bytes: int
    temporary_bytes: int
    is_refused: bool


class _Recorder:
    """Compiles programs and records the memory that they need."""

    def __init__(self, mesh: Mesh, decoding_weights: Params) -> None:
        self._mesh = mesh
        self._decoding_weights = decoding_weights
        self._programs: list[_CompiledProgram] = []

    def take(self) -> list[_CompiledProgram]:
        """Return the programs compiled since the last call."""
        programs, self._programs = self._programs, []
        return programs

    def __call__(self, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        leaves = [x for x in jax.tree.leaves(arguments) if hasattr(x, "sharding")]
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            shapes = self._lay_out(lowered.out_info)
            new_bytes, temporary_bytes, is_refused = 0, _refused_bytes(str(error), leaves), True
        else:
            shapes = compilation.output_shapes(lowered, compiled)
            memory = compiled.memory_analysis()
            assert memory is not None, "all of JAX's compilers state the memory of programs"
            new_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
            temporary_bytes, is_refused = memory.temp_size_in_bytes, False
        results = jax.tree.leaves(shapes)
        self._programs.append(
            _CompiledProgram(leaves, results, new_bytes, temporary_bytes, is_refused)
        )
        return shapes

    def _lay_out(self, results: Any) -> Any:
        """Return results with shardings, since a refused program has not chosen any."""
        structure = jax.tree.structure(results)
        weights = self._decoding_weights
        others = {name: x for name, x in weights.items() if not name.startswith("layer_")}
        for part in (others, weights["layer_0"]):
            # A program that lays weights out for decoding also returns the index of a layer.
            laid_out = (part, jax.ShapeDtypeStruct((), "int32"))
            if structure == jax.tree.structure(laid_out):  # type: ignore[operator]
                return laid_out
        parts = meshes.row_shards(self._mesh)

        def lay_out(x: Any) -> jax.ShapeDtypeStruct:
            layout = sharding.replicated(self._mesh)
            if x.ndim > 0 and x.shape[0] % parts == 0:
                layout = sharding.rows(self._mesh)
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
    step: AbstractStep, name: str, program: _CompiledProgram, counted: dict[int, Any]
) -> ProgramMemory:
    batch = bytes_per_device([x for x in program.arguments if id(x) not in counted])
    # The decoding copy has a separate column.
    if find_step_program(name).kind != "resharding":
        batch += program.new_result_bytes
    resident = resident_memory(step, name)
    if step.is_separate and find_step_program(name).kind != "resharding":
        # Sampling gets other shapes of the copy than the programs that make it returned.
        batch -= resident.decoding_copy
    # The compiler may share the memory of these with what is needed before or after.
    gradients = min(resident.gradients, program.temporary_bytes)
    cache = min(resident.cache, program.temporary_bytes - gradients)
    return dataclasses.replace(
        resident,
        gradients=gradients,
        cache=cache,
        batch=max(0, batch),
        temporaries=program.temporary_bytes - gradients - cache,
    )
