"""Compare gradients and optimizer steps on meshes with those on one device, in float64.

In float32, gradients on different meshes differ by about 1e-6 of the largest, and Adam amplifies
that: it divides a gradient that is nearly 0 by its own size. Float64, in which rounding is nine
orders of magnitude smaller, tells rounding from a mistake in a program. `--float32` prints the
differences in float32 after one optimizer step, with AdamW's default epsilon.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IS_WIDE = "--float32" not in sys.argv
jax.config.update("jax_num_cpu_devices", 8)
if IS_WIDE:
    jax.config.update("jax_enable_x64", True)
    # Every float32 that the package asks for is a float64 here. Before the package is imported.
    jnp.float32 = jnp.float64
    np.float32 = np.float64  # type: ignore[misc]

sys.path.append(str(Path(__file__).parents[1] / "ppo"))
import test_update  # noqa: E402

import tiny  # noqa: E402
from jax_ppo.models.architecture import Architecture  # noqa: E402

SHAPES = (
    {"data": 2, "fsdp": 2, "model": 2},
    {"data": 1, "model": 2},
    {"data": 1, "stage": 2, "fsdp": 2, "model": 2},
    {"data": 1, "fsdp": 2, "context": 2, "model": 2},
    {"data": 2, "context": 4},
    {"data": 1, "stage": 2, "context": 2, "model": 2},
)
NARROW_SHAPES = (
    {"data": 1, "fsdp": 8},
    {"data": 1, "model": 4},
    {"data": 2, "fsdp": 2, "model": 2},
)
UNGATED_SHAPES = ({"data": 1, "model": 2},)
# Those of experts with a router loss; and without one, which parts of sequences have not, with
# replayed experts.
EXPERT_SHAPES = (
    {"data": 2, "expert": 2, "model": 2},
    {"data": 1, "stage": 2, "fsdp": 2, "expert": 2},
)
REPLAY_SHAPES = (
    {"data": 1, "fsdp": 2, "expert": 2, "context": 2},
    {"data": 1, "stage": 2, "fsdp": 2, "expert": 2},
)
# For one to four parts of rows alike.
ROW_LENGTH = 24
make_config = tiny.config
make_rollout = tiny.make_rollout


def wide_config(**changes: Any) -> Any:
    """Return a configuration that computes in float64, which no option can ask for."""
    config = make_config(**changes)

    def store_wide(role: Any) -> Any:
        optim = dataclasses.replace(role.optim, param_dtype="float64", moments_dtype="float64")
        return dataclasses.replace(role, optim=optim)

    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="float64"),
        actor=store_wide(config.actor),
        critic=store_wide(config.critic),
    )


def make_recorded_rollout(mesh: Any, *arguments: Any) -> Any:
    """Return a rollout with recorded experts of each token."""
    rollout = make_rollout(mesh, *arguments)
    return dataclasses.replace(rollout, routed_experts=tiny.random_routing(mesh))


def main(arguments: Sequence[str]) -> None:
    """Compare meshes with one device, for three types of block, two of them with experts.

    Args:
      arguments: `--float32` for float32.
    """
    if not IS_WIDE:
        # Among a million parameters some have a gradient that is nearly 0.
        million = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
        compare(dataclasses.replace(tiny.ARCHITECTURE, **million, num_layers=4), NARROW_SHAPES)
        compare(dataclasses.replace(tiny.MIXTURE, **million), ({"data": 1, "expert": 4},))
        return
    tiny.config = wide_config
    # A layer for each of two stages.
    two_layers = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
    compare(two_layers, SHAPES)
    compare(tiny.UNGATED, UNGATED_SHAPES)
    compare(tiny.MIXTURE, EXPERT_SHAPES, actor__router_aux_loss_coef=0.5)
    compare(tiny.LATENT, EXPERT_SHAPES[:1], actor__router_aux_loss_coef=0.5)
    compare(tiny.LATENT, REPLAY_SHAPES[:1])
    tiny.make_rollout = make_recorded_rollout
    compare(tiny.MIXTURE, REPLAY_SHAPES)


def compare(architecture: Architecture, shapes: Sequence[dict[str, int]], **changes: Any) -> None:
    """Compare meshes of these shapes with one device; takes the same changes as `tiny.config`."""
    tiny.ARCHITECTURE = architecture
    options: dict[str, Any] = {"packing__row_length": ROW_LENGTH}
    groups, steps = test_update.ALL, "parameters after one optimizer step"
    if IS_WIDE:
        options |= {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__ppo_epochs": 2}
        options["actor__optim__eps"] = 1e-3
        groups, steps = test_update.HALVES * 2, "parameters after four steps"
    config = tiny.config(**options | changes)

    def run(mesh) -> tuple[object, object, object]:
        gradients, _ = test_update.run_gradients(config, mesh, rows=8)
        before, state, _ = test_update.run_update(config, mesh, groups, rows=8)
        trees = ((before.actor, before.critic), (state.actor, state.critic))
        return gradients, *(jax.tree.map(np.asarray, tree) for tree in trees)

    def largest(tree: object) -> float:
        return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))

    def difference(a: object, b: object) -> object:
        return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), a, b)

    gradients, before, after = run(tiny.make_mesh())
    step = largest(difference(after, before))
    assert step > 1e-3
    for shape in shapes:
        mesh = tiny.make_mesh(int(np.prod(list(shape.values()))), **shape)
        mesh_gradients, _, mesh_after = run(mesh)
        assert jax.tree.leaves(mesh_gradients)[0].dtype == (np.float64 if IS_WIDE else np.float32)
        error = largest(difference(gradients, mesh_gradients)) / largest(gradients)
        print(f"{shape}: gradients differ by {error:.1e} of the largest")
        assert error < (1e-12 if IS_WIDE else 1e-4)
        error = largest(difference(after, mesh_after)) / step
        print(f"{shape}: {steps} differ by {error:.1e} of the largest step", flush=True)
        assert error < 1e-9 or not IS_WIDE


if __name__ == "__main__":
    main(sys.argv[1:])
