"""safetensors files: read slice by slice, written one tensor at a time."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_ppo.errors import UserError
from jax_ppo.models.hf.model_folders import find_weight_files

SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Bits of each type without the sign, and of infinity. Larger patterns are NaN.
MAGNITUDE_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
}
# Values that are examined at a time, so that they stay in the processor's cache.
BLOCK_SIZE = 1 << 18
COMPARED_BYTES = 1 << 26  # bytes of a tensor that are compared at a time
# Experts in MXFP4, as gpt-oss is published (OCP Microscaling Formats 1.0): ends of the names of
# both tensors; numbers of four bits, of which groups share a power of two; its exponent's offset.
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
MXFP4_GROUP, MXFP4_BIAS = 32, 127
MXFP4_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The two numbers of each byte, of which the lower bits are the first one.
MXFP4_PAIRS = np.concatenate([MXFP4_MAGNITUDES, -MXFP4_MAGNITUDES])[
    np.arange(256)[:, None] >> np.array([0, 4]) & 15
]


class StoredTensor(NamedTuple):
    """Where a tensor is stored."""

    file: Any  # open
    file_name: str
    name: str  # in the file
    scales: Any = None  # the `StoredTensor` of the powers of two that belong to numbers in MXFP4

    def open(self) -> Any:
        """Return the tensor as an open slice."""
        values = self.file.get_slice(self.name)
        return values if self.scales is None else Mxfp4Tensor(values, self.scales.open())


class SafetensorsCheckpoint:
    """The tensors of a folder's memory-mapped safetensors files, as a context manager.

    Reading a slice of a tensor only touches the bytes of that slice.
    """

    def __init__(
        self,
        folder: str | Path,
        files: Sequence[Path] | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        """Open `files` of a folder; `None`: those that `find_weight_files` returns.

        `rename` maps a tensor's name in the files to its name here; "" leaves the tensor out.
        Raise `UserError` if files are incomplete, or hold different tensors of the same name.
        """
        self.folder = Path(folder)
        self._tensors: dict[str, StoredTensor] = {}
        if files is None:
            files = find_weight_files(self.folder)
        with contextlib.ExitStack() as opening:
            for path in files:
                try:
                    file = opening.enter_context(safe_open(path, framework="numpy"))
                except (SafetensorError, OSError) as error:
                    raise UserError(
                        f"{path} is not a whole safetensors file ({error}). If it was downloaded "
                        "or cloned, that stopped early or left a Git LFS pointer: fetch it again"
                    ) from error
                for stored_name in file.keys():
                    name = rename(stored_name)
                    if name in self._tensors and not _slices_are_equal(
                        self._slice(name), file.get_slice(stored_name)
                    ):
                        raise UserError(
                            f"{self.folder}: {self.file(name)} and {path.name} hold different "
                            f"tensors named {name}, so it is unclear which one belongs to the "
                            "model"
                        )
                    if name:
                        self._tensors[name] = StoredTensor(file, path.name, stored_name)
            self._join_mxfp4()
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._tensors[name].file_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as safetensors spells it: "F32", "BF16", "I8", ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor: one slice per dimension, or () for the whole tensor."""
        return self._slice(name)[index or ...]

    def read_finite(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor as `read` does; raise `UserError` if it has NaN or infinity."""
        values = self.read(name, index)
        if not is_finite(values, self.dtype(name)):
            raise UserError(
                f"{self.folder / self.file(name)}: {name} has values that are not finite (NaN or "
                "infinity)"
            )
        return values

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same type, shape and bytes."""
        return _slices_are_equal(self._slice(name), self._slice(other))

    def _join_mxfp4(self) -> None:
        """Take the two tensors of experts in MXFP4 for one in bfloat16."""
        for name in [name for name in self._tensors if name.endswith(MXFP4_BLOCKS)]:
            whole = name.removesuffix(MXFP4_BLOCKS)
            scales = self._tensors.get(whole + MXFP4_SCALES)
            joined = self._tensors[name]._replace(scales=scales)
            if scales is not None and whole not in self._tensors and joined.open().is_valid:
                del self._tensors[name], self._tensors[whole + MXFP4_SCALES]
                self._tensors[whole] = joined

    def _slice(self, name: str) -> Any:
        return self._tensors[name].open()


class Mxfp4Tensor:
    """A tensor [E, in, out] in MXFP4, with the methods of a slice of safetensors."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        """Read nothing yet.

        The two are open slices: blocks [E, out, in / 32, 16] with two numbers per byte, and scales
        [E, out, in / 32].
        """
        self._blocks, self._scales = blocks, scales

    @property
    def is_valid(self) -> bool:
        """Return whether the two tensors have the types and shapes of one."""
        shape = self._blocks.get_shape()
        types = {self._blocks.get_dtype(), self._scales.get_dtype()}
        is_whole = len(shape) == 4 and 2 * shape[3] == MXFP4_GROUP
        return is_whole and types == {"U8"} and self._scales.get_shape() == shape[:3]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * MXFP4_GROUP, outputs]

    def get_dtype(self) -> str:
        """Return the type, which holds each number exactly."""
        return "BF16"

    def __getitem__(self, index: Any) -> np.ndarray:
        parts = (slice(None),) * 3 if index is ... else index
        experts, inputs, outputs = (
            range(*part.indices(size)) for part, size in zip(parts, self.get_shape(), strict=True)
        )
        groups = slice(inputs.start // MXFP4_GROUP, -(-inputs.stop // MXFP4_GROUP))
        kept = slice(
            inputs.start - groups.start * MXFP4_GROUP, inputs.stop - groups.start * MXFP4_GROUP
        )
        values = np.empty((len(experts), len(inputs), len(outputs)), ml_dtypes.bfloat16)
        # One at a time, as float32 takes eight times the bytes of the file.
        for place, expert in enumerate(experts):
            at = slice(expert, expert + 1), slice(outputs.start, outputs.stop), groups
            exponents = self._scales[at][0].astype(np.int32) - MXFP4_BIAS
            numbers = MXFP4_PAIRS[self._blocks[*at, slice(None)][0]].reshape(
                *exponents.shape, MXFP4_GROUP
            )
            numbers *= np.ldexp(np.float32(1), exponents)[..., None]
            values[place] = numbers.reshape(len(outputs), -1)[:, kept].T
        return values


def is_finite(values: np.ndarray, code: str) -> bool:
    """Return whether a contiguous array of type `code` has neither NaN nor infinity.

    The bits are compared as integers, which costs about as much as reading them.
    """
    integer, magnitude, infinity = MAGNITUDE_BITS[code]
    bits = values.reshape(-1).view(integer)
    starts = range(0, bits.size, BLOCK_SIZE)
    return all((bits[i : i + BLOCK_SIZE] & magnitude).max() < infinity for i in starts)


def _slices_are_equal(one: Any, other: Any) -> bool:
    shape = one.get_shape()
    if shape != other.get_shape() or one.get_dtype() != other.get_dtype():
        return False
    if 0 in shape:
        return True
    if not shape:
        return one[...].tobytes() == other[...].tobytes()
    # A few rows at a time, because an embedding may be larger than the free memory.
    rows = max(1, COMPARED_BYTES // one[:1].nbytes)
    # safetensors refuses a slice beyond the end.
    blocks = [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)]
    return all(one[block].tobytes() == other[block].tobytes() for block in blocks)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Write a safetensors file with one array in memory at a time, unlike `save_file`.

    `tensors` maps names to (type as safetensors spells it, shape), in the order of `arrays`, which
    have any memory layout and are consumed to their end.
    """
    # transformers refuses a file without this metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end = start + int(np.prod(shape)) * SAFETENSORS_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # `strict` asks for the end of `arrays`, too.
        for (dtype, shape), array in zip(tensors.values(), arrays, strict=True):
            assert array.dtype == SAFETENSORS_DTYPES[dtype] and array.shape == tuple(shape)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
