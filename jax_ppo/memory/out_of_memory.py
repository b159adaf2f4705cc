"""Explain that a device ran out of memory: what holds the memory, and which options take less."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from jax_ppo.config import validation
from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.memory.least_memory import GIB, measure_least_memory
from jax_ppo.memory.remedies import rank_remedies, temporary_savings
from jax_ppo.runtime.device_memory import read_memory_limit
from jax_ppo.training.networks import Folders, Networks, read_networks

_EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's message begins, on every platform
_MAX_REMEDIES = 4


@contextlib.contextmanager
def explain_out_of_memory(
    config: Config, folders: Folders, nets: Networks, mesh: Mesh
) -> Iterator[None]:
    """Turn an allocation that failed in the block into a `UserError` that says what may help.

    Args:
      config: all options.
      folders: each role's checkpoint.
      nets: each role's model.
      mesh: the run's mesh.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _EXHAUSTED not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"a device ran out of memory: {first_line}",
            details="\n".join(_describe_memory(config, folders, nets, mesh)),
        ) from error


def _describe_memory(config: Config, folders: Folders, nets: Networks, mesh: Mesh) -> Iterator[str]:
    """Yield lines: what a device holds, and the changes of options that take less."""
    least = measure_least_memory(config, nets, mesh)
    limit = read_memory_limit()
    of_limit = ""
    if limit is not None:
        of_limit = f" of {limit / GIB:.1f} GiB"
    yield (
        f"  arrays that stay, per device: {least.peak / GIB:.3g} GiB{of_limit} ({least}); the rest "
        "is temporary: activations, logits and the decoding cache"
    )
    changes = [words for words, changed in temporary_savings(config, mesh) if _is_valid(changed)]
    if changes:
        yield f"  less that is temporary: {' or '.join(changes)}"
    remedies = rank_remedies(
        config,
        mesh,
        needed=least.peak,
        read_nets=lambda changed: read_networks(changed, folders),
        measure=lambda *changed: measure_least_memory(*changed).peak,
    )
    for remedy in remedies[:_MAX_REMEDIES]:
        saved = least.peak - remedy.needed
        yield f"  less that stays: {remedy.options} saves {saved / GIB:.3g} GiB"
    yield "  python -m jax_ppo.plan with the same options counts the temporary arrays, too"


def _is_valid(config: Config) -> bool:
    try:
        validation.validate_train_config(config)
    except UserError:
        return False
    return True
