"""Kernels of libraries: cuDNN's attention on NVIDIA GPUs, JAX's splash attention on TPUs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jax_ppo.runtime.compat import no_gradients_of_masks

# The program of a platform, if it can run; xla on the others.
PLATFORM_PROGRAMS = {"cuda": "cudnn", "tpu": "splash"}
# Queries per block and blocks per row in cuDNN's attention, where the mask of a block has 2 bytes
# per pair of a query and a key; and the keys of a tile of its kernels.
MIN_CUDNN_QUERY_BLOCK = 512
MAX_CUDNN_QUERY_BLOCKS = 8
CUDNN_TILE = 128
# Greatest head size of cuDNN's attention: on Hopper (compute capability 9.x), and elsewhere.
MAX_CUDNN_HEAD = {9: 256}
MAX_CUDNN_HEAD_ELSEWHERE = 128
# Block sizes of splash attention in tokens; the largest that divides the row is used.
SPLASH_BLOCKS = (512, 256, 128)
MAX_ROUNDING = 1 / 8  # rounding a row up to a larger block may add at most this part of its length


class AttentionFacts(NamedTuple):
    """The facts that decide which attention programs can run for whole sequences."""

    platform: str  # "cpu", "cuda", "rocm" or "tpu"
    dtype: DTypeLike  # of the computation
    head_dim: int  # d
    length: int  # T, number of tokens per row
    softcap: float | None = None  # of the logits
    sinks: bool = False  # heads have logits that belong to no key
    gpu_generation: int | None = None  # major part of an NVIDIA GPU's compute capability, if known


def select_attention_program(wanted: str, facts: AttentionFacts) -> str:
    """Return the program for whole sequences; raise `ValueError` with the reason if it cannot run.

    `wanted` is "xla", "cudnn", "splash", or "auto": the platform's program if it can run, else xla.
    """
    program = _preferred_program(wanted, facts.platform)
    reason = program_obstacle(program, facts)
    if reason and wanted != "auto":
        raise ValueError(reason)
    return "xla" if reason else program


def _preferred_program(wanted: str, platform: str) -> str:
    return PLATFORM_PROGRAMS.get(platform, "xla") if wanted == "auto" else wanted


def round_row_length(wanted: str, platform: str, length: int, parts: int = 1) -> int:
    """Return the least length of packed rows, at least `length`, that the program takes.

    Splash attention takes a multiple of 128 tokens, and is faster in blocks of 256 or 512: rows are
    rounded up to one of these if that adds at most `MAX_ROUNDING`. cuDNN takes even lengths, and
    parts of rows have two blocks. `parts` devices split a row evenly.
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


def program_obstacle(program: str, facts: AttentionFacts) -> str | None:
    """Return why "xla", "cudnn" or "splash" cannot run, or `None` if it can."""
    platform, dtype, head_dim, length, softcap, sinks, generation = facts
    if sinks and program != "xla":
        return f"{program} does not support the model's attention sinks"
    max_head = MAX_CUDNN_HEAD.get(generation or 0, MAX_CUDNN_HEAD_ELSEWHERE)
    block = SPLASH_BLOCKS[-1]
    obstacles = {
        "xla": {},
        "cudnn": {
            f"cuDNN needs an NVIDIA GPU, not {platform}": platform != "cuda",
            f"cuDNN's attention needs a 16-bit type, not {jnp.dtype(dtype).name}": (
                jnp.dtype(dtype).itemsize != 2
            ),
            f"cuDNN's attention needs a head size that is a multiple of 8 and at most {max_head} "
            f"on this GPU, not {head_dim}": head_dim % 8 or head_dim > max_head,
            f"cuDNN's attention needs rows of an even length, not {length} tokens": (length % 2),
            f"cuDNN's attention does not support the model's soft cap of logits, {softcap}": (
                softcap is not None
            ),
        },
        "splash": {
            f"splash attention needs a TPU, not {platform}": platform != "tpu",
            f"splash attention needs rows of a multiple of {block} tokens, not {length}": (
                length % block
            ),
        },
    }
    return next((reason for reason, applies in obstacles[program].items() if applies), None)


def program_for_length(program: str, length: int) -> str:
    """Return the program, or xla if it does not take rows of `length` tokens."""
    return "xla" if length % {"cudnn": 2, "splash": SPLASH_BLOCKS[-1]}.get(program, 1) else program


def cudnn_block_size(length: int) -> int:
    """Return the number of queries whose mask cuDNN's attention makes at once."""
    size = max(MIN_CUDNN_QUERY_BLOCK, -(-length // MAX_CUDNN_QUERY_BLOCKS))
    return -(-size // CUDNN_TILE) * CUDNN_TILE


def forget_mask(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Keep only what cuDNN returns for the backward pass, which makes the mask again."""
    return jax.checkpoint(attend, policy=lambda primitive, *_, **__: "attention" in primitive.name)


def cudnn_products(
    q: Float[Array, "B Q H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    visible: Bool[Array, "B_or_1 Q S"] | None,
    *,
    softcap: float | None = None,
    **options: Any,
) -> Float[Array, "B Q H d"]:
    """Compute attention with cuDNN to the keys that are visible, which reads all of them."""
    assert softcap is None, "select_attention_program refuses it"
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
    if visible is None:
        return attend(q, k, v)
    if k.shape[1] % CUDNN_TILE == CUDNN_TILE // 2:
        # With so many keys and a mask, cuDNN before 9.26 can return NaN as the gradient of queries
        # on Hopper (github.com/pytorch/pytorch/issues/196678). No query reads these two.
        k, v = (jnp.pad(x, [(0, 0), (0, 2), (0, 0), (0, 0)]) for x in (k, v))
        visible = jnp.pad(visible, [(0, 0), (0, 0), (0, 2)])
    with no_gradients_of_masks():
        return attend(q, k, v, mask=visible[:, None])


def make_splash_kernel(
    heads: int,
    length: int,
    parts: int = 1,
    *,
    softcap: float | None = None,
    sliding_window: int | None = None,
    interpret: bool = False,
) -> Any:
    """Return JAX's kernel for all queries of a row, in the order of the parts of the row.

    `interpret` runs the Python code of the kernel on any platform, slowly.
    """
    # This import takes a fifth of a second, which other programs do not need.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

    size = next(size for size in SPLASH_BLOCKS if length // parts % size == 0)
    mask: splash_lib.CausalMask | splash_lib.LocalMask
    if sliding_window is None:
        mask = splash_lib.CausalMask((length, length))
    else:
        mask = splash_lib.LocalMask((length, length), (sliding_window - 1, 0), 0)
    if parts > 1:
        # The mask is a function of these columns.
        blocks = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
        mask.q_sequence = np.stack([blocks[:parts], blocks[::-1][:parts]], axis=1).reshape(-1)
    queries = ("block_q", "block_q_dkv", "block_q_dq")
    keys = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys((*queries, *keys), size)
    return splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=softcap,
        block_sizes=splash_lib.BlockSizes(**sizes),
        interpret=interpret,
    )


def run_splash_kernel(
    attend_heads: Any,
    q_BxQxHxd: Float[Array, "B Q H d"],
    k_BxTxKxd: Float[Array, "B T K d"],
    v_BxTxKxd: Float[Array, "B T K d"],
    query_segments: Int[Array, "B Q"] | None,
    key_segments: Int[Array, "B T"] | None,
    scale: float | None,
) -> Float[Array, "B Q H d"]:
    """Run a splash kernel for each row."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

    # The kernel has no option for the scale, so the queries are scaled.
    factor = q_BxQxHxd.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.swapaxes(1, 2) for x in (q_BxQxHxd * factor, k_BxTxKxd, v_BxTxKxd))
    segments = None
    if query_segments is not None and key_segments is not None:
        segments = splash_lib.SegmentIds(query_segments, key_segments)
    return jax.vmap(attend_heads)(q, k, v, segments).swapaxes(1, 2)
