"""The message when a device runs out of memory: what holds it, and which options take less."""

import contextlib
from collections.abc import Iterator

import jax

from jax_ppo.errors import UserError
from jax_ppo.memory.memory_check import GIB, PPOMemory
from jax_ppo.memory.remedies import PossibleChanges, is_valid_for_training
from jax_ppo.runtime.device_memory import read_memory_limit

_EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's message begins, on every platform
_MAX_REMEDIES = 4


@contextlib.contextmanager
def explain_out_of_memory(run: PPOMemory) -> Iterator[None]:
    """Turn an allocation that failed in the block into a `UserError` that says what may help."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _EXHAUSTED not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"a device ran out of memory: {first_line}",
            details="\n".join(_describe_memory(run)),
        ) from error


def _describe_memory(run: PPOMemory) -> Iterator[str]:
    """Yield lines: what a device holds, and the changes of options that take less."""
    least = run.measure()
    limit = read_memory_limit()
    of_limit = ""
    if limit is not None:
        of_limit = f" of {limit / GIB:.1f} GiB"
    yield (
        f"  arrays that stay, per device: {least.peak / GIB:.3g} GiB{of_limit} ({least}); the rest "
        "is temporary: activations, logits and the decoding cache"
    )
    savings = PossibleChanges(run.config, run.mesh).save_temporary_memory()
    changes = [words for words, changed in savings if is_valid_for_training(changed)]
    if changes:
        yield f"  less that is temporary: {' or '.join(changes)}"
    for remedy in run.rank_remedies(least.peak)[:_MAX_REMEDIES]:
        saved = least.peak - remedy.needed
        yield f"  less that stays: {remedy.options} saves {saved / GIB:.3g} GiB"
    yield "  python -m jax_ppo.plan with the same options counts the temporary arrays, too"
