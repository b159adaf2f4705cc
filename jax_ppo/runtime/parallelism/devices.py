"""Functions that each device runs on its own parts of arrays, inside compiled functions."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh

from jax_ppo.runtime.meshes import ROWS

Function = TypeVar("Function", bound=Callable[..., Any])


def remaining_axes(mesh: AbstractMesh) -> set[str]:
    """Return the axes that are left to split: fewer inside `split_rows` or a pipeline stage."""
    return set(mesh.axis_names) - set(mesh.manual_axes)


def remaining_row_axes(mesh: AbstractMesh) -> tuple[str, ...] | None:
    """Return the axes that still split rows: none inside `split_rows`, some in a stage."""
    return tuple(axis for axis in ROWS if axis not in mesh.manual_axes) or None


def on_each_device(function: Function, in_specs: Any, out_specs: Any) -> Function:
    """Make each device run `function` on its parts, which the remaining axes split.

    It takes and returns arrays, as `in_specs` and `out_specs` split them, and may exchange data
    along these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
        axis_names=remaining_axes(mesh),
    )
