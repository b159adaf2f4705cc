"""Run scoring, an update and decoding on every mesh of 8 and 16 devices, in float64.

    PYTHONPATH=.:tests python tests/harness/mesh_sweep.py --devices 8 16

A dense model runs on every mesh without `expert`, a mixture of experts on every one with it, and
other blocks and replayed experts on some. Each line has the largest relative difference from one
device of what is scored and of four optimizer steps of actor and critic; the tokens that are drawn
must be the same.

In float32, gradients on different meshes differ by about 1e-6 of the largest, and Adam amplifies
that: it divides a gradient that is nearly 0 by its own size. Float64, in which rounding is nine
orders of magnitude smaller, tells rounding from a mistake in a program.
"""

import argparse
import collections
import dataclasses
import gc
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import conftest  # noqa: F401  (for its XLA_FLAGS)
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
# Every float32 that the package asks for is a float64 here. Before the package is imported.
jnp.float32 = jnp.float64
np.float32 = np.float64  # type: ignore[misc]

import tiny  # noqa: E402
import tiny_actor  # noqa: E402
from jax_ppo.errors import UserError  # noqa: E402
from jax_ppo.models.architecture import Architecture  # noqa: E402
from jax_ppo.models.transformer import Transformer  # noqa: E402
from jax_ppo.runtime import meshes  # noqa: E402
from jax_ppo.sampler.engine import SamplingOptions  # noqa: E402

# Every program is compiled once: none is read from the disk.
jax.config.update("jax_enable_compilation_cache", False)

MOST_DEVICES = 16
SAMPLES = 16
# Two mini-batches, each of them twice.
GROUPS = [list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2))] * 2
# Two blocks of columns for each of 16 parts.
ROW_LENGTH = 32
SAMPLING = SamplingOptions(tiny.T, 1.0, eos_ids=(1,), slots=1)
# Widths that 16 devices divide; the heads of queries and keys, they do not.
DENSE = dataclasses.replace(tiny.ARCHITECTURE, head_dim=8)
MIXTURE = dataclasses.replace(tiny.MIXTURE, head_dim=8, num_experts=16)
MESHES_PER_CACHE = 8

Shape = dict[str, int]


class Case(NamedTuple):
    """A model on a mesh.

    Attributes:
      name: of the model.
      architecture: of both roles.
      shape: sizes of the axes of the mesh that are not 1.
      replays: whether the rollout has a record of the experts of each token.
    """

    name: str
    architecture: Architecture
    shape: Shape
    replays: bool = False


PARTS_OF_EXPERTS = {"fsdp": 2, "expert": 2, "context": 2}
FURTHER_CASES = (
    Case("ungated", tiny.UNGATED, {"model": 2}),
    Case("latent", tiny.LATENT, {"data": 2, "expert": 2, "model": 2}),
    Case("latent", tiny.LATENT, PARTS_OF_EXPERTS),
    Case("replayed mixture", tiny.MIXTURE, PARTS_OF_EXPERTS, replays=True),
    Case("replayed mixture", tiny.MIXTURE, {"stage": 2, "fsdp": 2, "expert": 2}, replays=True),
)


class Result(NamedTuple):
    """What one step computes, on the host.

    Attributes:
      experience: log-probs, values and advantages of random responses.
      before: parameters of actor and critic before the update.
      after: those after it.
      responses: tokens that are drawn from the actor.
    """

    experience: Any
    before: Any
    after: Any
    responses: np.ndarray


def mesh_cases(devices: int) -> Iterator[Case]:
    """Yield a case for every way to write a number of devices as the product of the axes' sizes."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for product in itertools.product(sizes, repeat=len(meshes.AXES)):
        if math.prod(product) == devices:
            shape = dict(zip(meshes.AXES, product, strict=True))
            # A mixture where devices share out experts, else a dense model.
            name, model = ("mixture", MIXTURE) if shape["expert"] > 1 else ("dense", DENSE)
            layers = max(2, shape["stage"])
            yield Case(name, dataclasses.replace(model, num_layers=layers), shape)


def make_config(case: Case) -> Any:
    """Return the options of a step in float64; the router's loss needs whole rows."""
    shape = dict.fromkeys(meshes.AXES, 1) | case.shape
    has_router_loss = shape["expert"] > 1 and shape["context"] == 1
    config = tiny.config(
        actor__use_kl_loss=True,
        actor__kl_loss_coef=0.1,
        actor__ppo_epochs=2,
        actor__optim__eps=1e-3,
        actor__router_aux_loss_coef=0.5 if has_router_loss else 0.0,
        packing__row_length=ROW_LENGTH,
        **{f"mesh__{axis}": size for axis, size in shape.items()},
    )

    def store_wide(role: Any) -> Any:
        # No option can ask for it.
        optim = dataclasses.replace(role.optim, param_dtype="float64", moments_dtype="float64")
        return dataclasses.replace(role, optim=optim)

    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="float64"),
        actor=store_wide(config.actor),
        critic=store_wide(config.critic),
    )


def run_step(config: Any, mesh: jax.sharding.Mesh, replays: bool) -> Result:
    """Score random responses, update actor and critic with them, and draw others."""
    # A row of each device in a micro-batch.
    rows = meshes.row_shards(mesh) // meshes.row_parts(mesh)
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
        before = jax.tree.map(np.array, (state.actor, state.critic))
        rollout = tiny.make_rollout(mesh, samples=SAMPLES)
        model = Transformer(tiny.ARCHITECTURE, jnp.float64)
        drawn = tiny_actor.sample_on_mesh(mesh, model, state.actor, rollout.prompts, SAMPLING)
        if replays:
            experts = tiny.random_routing(mesh, samples=SAMPLES)
            rollout = dataclasses.replace(rollout, routed_experts=experts)
        experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=rows)
        scored = jax.tree.map(np.asarray, experience)
        batches = tiny.pack_batches(config, mesh, rollout, GROUPS, rows)
        state, _ = tiny.update_state(config, state, experience, batches, batches)
        after = jax.tree.map(np.asarray, (state.actor, state.critic))
        return Result(scored, before, after, drawn.responses)


def relative_difference(ours: Any, expected: Any, origin: Any = None) -> float:
    """Return the largest difference of an array, relative to its own largest value.

    With `origin`, all arrays are relative to the largest change since then.
    """
    ours, expected = jax.tree.leaves(ours), jax.tree.leaves(expected)
    errors = [np.abs(a * 1.0 - b * 1.0).max() for a, b in zip(ours, expected, strict=True)]
    if origin is None:
        scales = [max(np.abs(b).max(), 1e-3) for b in expected]
    else:
        steps = zip(expected, jax.tree.leaves(origin), strict=True)
        scales = [max(np.abs(b - a).max() for b, a in steps)] * len(errors)
    return float(max(error / scale for error, scale in zip(errors, scales, strict=True)))


class Comparison:
    """Runs meshes; what one device computes is kept for meshes with the same model and losses."""

    def __init__(self) -> None:
        self._alone: dict[Any, Result] = {}

    def run(self, case: Case) -> str:
        """Compare a mesh with one device, and return a line.

        Raises:
          UserError: the program refuses the mesh.
          AssertionError: a difference is no rounding.
        """
        config = make_config(case)
        tiny.ARCHITECTURE = case.architecture
        mesh = tiny.make_mesh(math.prod(case.shape.values()), **{"data": 1} | case.shape)
        meshes.validate_architecture(mesh, tiny.ARCHITECTURE)
        kind = tiny.ARCHITECTURE, config.actor.router_aux_loss_coef, case.replays
        if kind not in self._alone:
            self._alone[kind] = run_step(config, tiny.make_mesh(), case.replays)
        alone, ours = self._alone[kind], run_step(config, mesh, case.replays)
        scored = relative_difference(ours.experience, alone.experience)
        updated = relative_difference(ours.after, alone.after, alone.before)
        drawn = (ours.responses == alone.responses).all()
        line = f"scored {scored:.1e}, updated {updated:.1e}, drawn tokens equal: {drawn}"
        assert scored < 1e-11 and updated < 1e-9 and drawn, line
        return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the further cases and all meshes, or some of these in the order of a seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, MOST_DEVICES])
    parser.add_argument("--part", type=int, help="number of meshes; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    cases = [case for devices in options.devices for case in mesh_cases(devices)]
    random.Random(options.seed).shuffle(cases)
    comparison = Comparison()
    counts: collections.Counter[str] = collections.Counter()
    for number, case in enumerate([*FURTHER_CASES, *cases[: options.part]]):
        name = " x ".join(f"{axis} {size}" for axis, size in case.shape.items() if size > 1)
        try:
            result, outcome = comparison.run(case), "equal"
        except UserError as error:
            result, outcome = f"refused: {error}", "refused"
        except Exception as error:  # The others run, too.
            result, outcome = f"FAILED {type(error).__name__}: {error}", "failed"
        print(f"{math.prod(case.shape.values())} {case.name} {name}: {result}", flush=True)
        counts[outcome] += 1
        if number % MESHES_PER_CACHE == 0:
            # Memory maps are limited (conftest.py).
            jax.clear_caches()
            gc.collect()
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items())))
    assert not counts["failed"]


if __name__ == "__main__":
    main()
