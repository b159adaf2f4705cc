"""Sizes that choose themselves: recomputation and micro-batches, by the memory that is free.

The fastest sizes are taken whose memory, by the estimate, stays within a share of what is free. The
compiler's figures then decide: a program that needs more, or an allocation that fails, makes the
run continue with smaller sizes; without any, it is refused. Sizes change results by rounding alone.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_ppo.config.loading import AUTO
from jax_ppo.memory.abstract_step import AbstractStep
from jax_ppo.memory.memory_check import EXHAUSTED, GIB, OutOfMemory
from jax_ppo.memory.memory_estimate import ProgramMemory, estimate_memory
from jax_ppo.runtime import distributed, meshes
from jax_ppo.runtime.compiled_programs import Compile, compile_program, output_shapes

SHARE = 0.85  # of the free memory; the rest is for fragmentation and programs of evaluations
_CHECKPOINTING = "model.gradient_checkpointing"
_ROWS = "actor.ppo_micro_batch_size_per_device"
_POLICY = "model.gradient_checkpointing_policy"
# Programs whose memory depends on the number of slots, which is chosen separately.
_SAMPLING = ("prepare_weights", "sample")
# What the backward pass recomputes, fastest first. "dots" keeps products, "attention" less.
_RECOMPUTATIONS: tuple[dict[str, Any], ...] = (
    {_CHECKPOINTING: False, _POLICY: "full"},
    {_CHECKPOINTING: True, _POLICY: "dots"},
    {_CHECKPOINTING: True, _POLICY: "attention"},
    {_CHECKPOINTING: True, _POLICY: "full"},
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Values of the options that are `auto`, and what the largest program needs with them."""

    options: Mapping[str, Any]  # by dotted name
    needed: int = 0  # estimated bytes per device; 0 without an estimate

    def __str__(self) -> str:
        hidden = () if self.options.get(_CHECKPOINTING) else (_POLICY,)
        shown = {name: value for name, value in self.options.items() if name not in hidden}
        return ", ".join(f"{name}={AUTO if x is None else x}" for name, x in shown.items())


@dataclasses.dataclass(frozen=True)
class SizeChoice:
    """The sizes of a run among those that it can have."""

    ranked: Sequence[Sizes]  # fastest first
    index: int
    available: float  # bytes per device

    @property
    def sizes(self) -> Sizes:
        """Return the chosen sizes."""
        return self.ranked[self.index]

    @property
    def limit(self) -> float:
        """Return the bytes per device that a program may need: all, if no sizes are smaller."""
        return self.available * (SHARE if self.ranked[self.index + 1 :] else 1)

    @property
    def fits(self) -> bool:
        """Return whether the sizes fit by the estimate; `False` without one."""
        return 0 < self.sizes.needed <= SHARE * self.available

    def smaller(self, needed: int = 0) -> "SizeChoice | None":
        """Return the fastest of the smaller sizes that fit, or the smallest, if there are any.

        `needed` are the bytes of the present sizes by the compiler, which correct the estimates.
        """
        later = range(self.index + 1, len(self.ranked))
        if not later:
            return None
        scale = needed / self.sizes.needed if needed and self.sizes.needed else 1.0
        fitting = (i for i in later if self.ranked[i].needed * scale <= self.limit)
        return dataclasses.replace(self, index=next(fitting, later[-1]))

    def __str__(self) -> str:
        """Return a line for the user; empty without a choice."""
        if not self.sizes.options:
            return ""
        text = f"sizes by the free memory: {self.sizes}"
        if self.sizes.needed:
            of = f"of {self.available / GIB:.3g} GiB per device"
            text += f", about {self.sizes.needed / GIB:.3g} {of}"
            if self.index:
                larger = self.ranked[self.index - 1]
                text += f" ({larger} would need about {larger.needed / GIB:.3g})"
        return text


AS_SET = SizeChoice((Sizes({}, 1),), 0, math.inf)  # the devices do not state their memory


def choose_sizes(
    ranked: Sequence[Sizes], available: float, kept: Mapping[str, Any] | None = None
) -> SizeChoice:
    """Return the fastest sizes that fit by their estimates, or the smallest.

    `ranked` are all sizes, fastest first; `available` are the bytes per device, and `kept` the
    options of a checkpoint, by dotted name, whose sizes stay as long as they fit.
    """
    choice = SizeChoice(ranked, 0, available)
    fitting = [i for i, sizes in enumerate(ranked) if sizes.needed <= choice.limit]
    same = [i for i in fitting if kept and ranked[i].options.items() <= kept.items()]
    index = (same or fitting or [len(ranked) - 1])[0]
    # Every process compiles the same programs, and judges them by the same memory.
    indices, limits = zip(*distributed.allgather_json([index, available]), strict=True)
    return SizeChoice(ranked, max(indices), min(limits))


def rank_sizes(
    checkpointing: bool | None,
    rows: tuple[str, int | None],
    default_rows: int,
    estimate: Callable[[Mapping[str, Any]], int],
) -> list[Sizes]:
    """Return the values of the options that are `auto`, fastest first; if none is, one empty entry.

    `rows` are name and value of the option of the rows that a device processes at once, and
    `default_rows` their number by default; `estimate` returns the bytes per device with sizes.
    """
    rows_option, rows_set = rows
    options = [*_RECOMPUTATIONS] if checkpointing is None else [{}]
    if rows_set is None:
        options = [{**values, rows_option: None} for values in options]
        # Fewer rows read all weights more often, which takes longer than to recompute.
        while default_rows > 1:
            default_rows //= 2
            options.append({**options[-1], rows_option: default_rows})
    return [Sizes(values, estimate(values)) for values in options]


def rank_step_sizes(build: Callable[[Mapping[str, Any]], AbstractStep]) -> list[Sizes]:
    """Return the sizes of a PPO run with estimates, see `rank_sizes`.

    `build` returns the step with values of options by their dotted names.
    """
    step = build({})
    config, mesh = step.config, step.mesh
    packing = step.packed.mini_batches["actor"].packing
    return rank_sizes(
        config.model.gradient_checkpointing,
        (_ROWS, config.actor.ppo_micro_batch_size_per_device),
        packing.sample.shape[-2] * meshes.row_parts(mesh) // meshes.row_shards(mesh),
        lambda sizes: largest_peak(estimate_memory(build(sizes))),
    )


def largest_peak(memory: Mapping[str, ProgramMemory]) -> int:
    """Return the bytes of the largest program but sampling, whose slots are counted apart."""
    return max(x.peak for name, x in memory.items() if name not in _SAMPLING)


def compile_within(choice: SizeChoice, resident: int) -> Compile:
    """Return a function that compiles a program and raises `OutOfMemory` if it needs too much.

    `resident` are the bytes per device of the arrays that stay, most of which programs read.
    """

    def compile_(name: str, lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
        if name in _SAMPLING:
            return compile_program(name, lowered, arguments)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:  # as TPUs' compilers do
            reason = str(error).partition("\n")[0]
            if EXHAUSTED not in reason:
                raise
            needed = int(choice.available)  # at least
            raise OutOfMemory(f"{name or 'a step'}: {reason}", needed=needed) from error
        memory = compiled.memory_analysis()
        if memory is None:  # not all plugins state it
            return output_shapes(lowered, compiled)
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = resident + memory.temp_size_in_bytes + new
        if needed > choice.limit:
            figures = f"{needed / GIB:.3g} of {choice.available / GIB:.3g} GiB per device"
            raise OutOfMemory(f"{name or 'a step'} needs {figures}", needed=needed)
        return output_shapes(lowered, compiled)

    return compile_


@contextlib.contextmanager
def raise_in_all_processes() -> Iterator[None]:
    """Raise an `OutOfMemory` of the block of one process in all, which must reach its end."""
    needed, reason = 0, ""
    try:
        yield
    except OutOfMemory as error:
        needed, reason = error.needed, str(error)
    needed, reason = max(distributed.allgather_json([needed, reason]))
    if needed:
        raise OutOfMemory(reason, needed=needed)
