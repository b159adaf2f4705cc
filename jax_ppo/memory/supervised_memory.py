"""The least memory of supervised training on each device, compared with what the devices have.

A lower bound by arithmetic, known before weights are loaded; activations and logits come on top.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.runtime.device_memory import bytes_per_device, read_memory_limit
from jax_ppo.supervised.parameters import trained_shapes
from jax_ppo.training.stochastic_rounding import gradient_shapes

_GIB = 2**30


def validate_memory(config: Config, model: Transformer, head: str, mesh: Mesh) -> None:
    """Raise `UserError` if the run cannot fit the devices of this process.

    The message names changes of options that would save memory, the best first. Platforms that
    report no memory, such as CPUs, are not checked.

    Args:
      config: all options.
      model: the network.
      head: "lm" or "scalar".
      mesh: the run's mesh.
    """
    limit = read_memory_limit()
    if limit is None:
        return
    least = measure_least_memory(config, model, head, mesh)
    needed = sum(least.values())
    if needed <= limit:
        return
    remedies = []
    for words, changed, changed_mesh in _possible_changes(config, mesh):
        changed_need = sum(measure_least_memory(changed, model, head, changed_mesh).values())
        if changed_need < needed:
            text = f"{words} needs at least {changed_need / _GIB:.1f}"
            remedies.append((changed_need, text))
    parts = ", ".join(f"{name} {bytes_ / _GIB:.1f}" for name, bytes_ in least.items())
    suggestions = "; ".join(text for _, text in sorted(remedies))
    raise UserError(
        f"config.mesh: a device needs at least {needed / _GIB:.1f} GiB for the run ({parts}) and "
        f"has {limit / _GIB:.1f}. {suggestions or 'More devices are needed'}"
    )


def measure_least_memory(
    config: Config, model: Transformer, head: str, mesh: Mesh
) -> dict[str, int]:
    """Return the bytes on each device of the arrays that an optimizer step needs, by name."""
    shapes: dict[str, Any] = trained_shapes(config.supervised, model, head, mesh)
    gradients = gradient_shapes(shapes["params"], config.supervised.optim.gradient_dtype)
    return {
        "parameters": bytes_per_device(shapes["params"]),
        "optimizer": bytes_per_device(shapes["optimizer"]),
        "gradients": bytes_per_device(gradients),
    }


def _possible_changes(config: Config, mesh: Mesh) -> Iterator[tuple[str, Config, Mesh]]:
    """Yield the words of each change on the command line, the options and the mesh after it."""
    split = meshes.split_copies(mesh)
    yield (
        f"config.mesh.data=1 with config.mesh.fsdp={split.fsdp}",
        dataclasses.replace(config, mesh=split),
        meshes.make_mesh(split, list(mesh.devices.flat)),
    )
    names = ("param_dtype", "moments_dtype", "gradient_dtype")
    words = " with ".join(f"config.supervised.optim.{name}=bfloat16" for name in names)
    optim = dataclasses.replace(
        config.supervised.optim,
        param_dtype="bfloat16",
        moments_dtype="bfloat16",
        gradient_dtype="bfloat16",
    )
    supervised = dataclasses.replace(config.supervised, optim=optim)
    yield words, dataclasses.replace(config, supervised=supervised), mesh
