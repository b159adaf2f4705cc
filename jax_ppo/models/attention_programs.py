"""Select the program that computes attention on a platform, and the row lengths that it takes.

attention.py selects among these programs.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

# Block sizes of splash attention in tokens; the largest that divides the row is used.
SPLASH_BLOCKS = (512, 256, 128)
# Rounding a row up to a larger block may add at most this part of its length.
MAX_ROUNDING = 1 / 8
# Greatest head size of cuDNN's attention and its gradient: on Hopper (compute capability 9.x), and
# on other GPUs.
MAX_CUDNN_HEAD = {9: 256}
MAX_CUDNN_HEAD_ELSEWHERE = 128
# The program of a platform, if it can run; xla on the others.
PLATFORM_PROGRAMS = {"cuda": "cudnn", "tpu": "splash"}


def select_attention_program(
    wanted: str, platform: str, dtype: DTypeLike, head_dim: int, length: int, **facts: Any
) -> str:
    """Return the program for whole sequences; raise `ValueError` with the reason if it cannot run.

    `wanted` is "xla", "cudnn", "splash", or "auto": the platform's own program if it can run, else
    xla. The other arguments are as for `program_obstacle`.
    """
    program = _preferred_program(wanted, platform)
    reason = program_obstacle(program, platform, dtype, head_dim, length, **facts)
    if reason and wanted == "auto":
        return "xla"
    if reason:
        raise ValueError(reason)
    return program


def _preferred_program(wanted: str, platform: str) -> str:
    """Return the program that is wanted, or with "auto" the platform's own."""
    if wanted == "auto":
        return PLATFORM_PROGRAMS.get(platform, "xla")
    return wanted


def round_row_length(wanted: str, platform: str, length: int, parts: int = 1) -> int:
    """Return the least length of packed rows, at least `length`, that the program takes.

    Splash attention takes a multiple of 128 tokens, and is faster in blocks of 256 or 512: rows are
    rounded up to one of these if that adds at most `MAX_ROUNDING`. cuDNN takes even lengths, and
    parts of rows have two blocks.

    `length` counts the tokens of the longest sample, and `parts` the devices that a row is split
    over, each with as many tokens.
    """
    if parts > 1:
        part = round_row_length(wanted, platform, -(-length // parts))
        return parts * (part + part % 2)
    program = _preferred_program(wanted, platform)
    if program == "cudnn":
        return length + length % 2
    if program != "splash":
        return length
    rounded = [-(-length // block) * block for block in SPLASH_BLOCKS]
    return next((x for x in rounded if x - length <= MAX_ROUNDING * length), rounded[-1])


def program_obstacle(
    program: str,
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    length: int,
    softcap: float | None = None,
    sinks: bool = False,
    gpu_generation: int | None = None,
) -> str | None:
    """Return why a program for whole sequences cannot run, or `None` if it can.

    Args:
      program: "xla", "cudnn" or "splash".
      platform: "cpu", "cuda", "rocm" or "tpu".
      dtype: of the computation.
      head_dim: d.
      length: T, number of tokens per row.
      softcap: soft cap of the logits, or `None`.
      sinks: whether heads have logits that belong to no key.
      gpu_generation: major part of an NVIDIA GPU's compute capability; `None` if it is unknown.
    """
    max_head = MAX_CUDNN_HEAD_ELSEWHERE
    if gpu_generation is not None:
        max_head = MAX_CUDNN_HEAD.get(gpu_generation, max_head)
    obstacles = {
        "xla": (),
        "cudnn": (
            (platform != "cuda", f"cuDNN needs an NVIDIA GPU, this is {platform}"),
            (
                jnp.dtype(dtype).itemsize != 2,
                f"cuDNN's attention takes 16-bit types, not {jnp.dtype(dtype).name}",
            ),
            (
                head_dim % 8 or head_dim > max_head,
                f"cuDNN's attention takes heads of a multiple of 8 up to {max_head} on this GPU, "
                f"the model's have {head_dim}",
            ),
            (
                length % 2,
                f"cuDNN's attention takes rows of an even length, these have {length} tokens",
            ),
            (
                softcap is not None,
                f"cuDNN's attention has no soft cap of logits, the model's is {softcap}",
            ),
        ),
        "splash": (
            (platform != "tpu", f"splash attention needs a TPU, this is {platform}"),
            (
                length % SPLASH_BLOCKS[-1],
                f"splash attention takes rows of a multiple of {SPLASH_BLOCKS[-1]} tokens, these "
                f"have {length}",
            ),
        ),
    }
    if sinks and program != "xla":
        return f"{program} has no attention sinks, the model has"
    return next((reason for applies, reason in obstacles[program] if applies), None)
