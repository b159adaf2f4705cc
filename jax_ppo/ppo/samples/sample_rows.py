"""Rows of arrays with a row per sample, taken from several pools of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import program


@program(static_argnames=("layout",))
def take_rows(
    pools: tuple[dict[str, Any], ...], rows: jax.Array, layout: NamedSharding
) -> dict[str, Any]:
    """Return rows, int [r], of the concatenated arrays of all pools."""

    def take(*arrays: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.concatenate(arrays)[rows], layout)

    return jax.tree.map(take, *pools)


def rows_of_groups(groups: np.ndarray, n: int) -> np.ndarray:
    """Return the rows of the n samples of each group."""
    return (groups[:, None] * n + np.arange(n)).ravel()


def take_on_mesh(mesh: Mesh, pools: tuple[dict[str, Any], ...], rows: np.ndarray) -> dict[str, Any]:
    """Return what `take_rows` does, for rows on the host."""
    placed = placement.place(rows.astype(np.int32), sharding.replicated(mesh))
    return take_rows(pools, placed, sharding.batch_rows(mesh, len(rows)))
