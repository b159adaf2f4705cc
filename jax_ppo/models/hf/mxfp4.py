"""Experts in MXFP4, as gpt-oss is published, read as bfloat16.

Groups of 32 inputs are numbers of four bits with a power of two (OCP Microscaling Formats 1.0).
"""

from typing import Any

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors
_GROUP = 32
_BIAS = 127  # of the exponents
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
# The two numbers of each byte, of which the lower bits are the first one.
_PAIRS = _NUMBERS[np.arange(256)[:, None] >> np.array([0, 4]) & 15]


class Mxfp4Tensor:
    """A tensor [E, in, out] of which files hold two, with the methods of a slice of safetensors.

    The two are open slices: blocks [E, out, in / 32, 16] with two numbers per byte, and scales
    [E, out, in / 32].
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        """Read nothing yet."""
        self._blocks, self._scales = blocks, scales

    @property
    def is_valid(self) -> bool:
        """Return whether the two tensors have the types and shapes of one."""
        shape = self._blocks.get_shape()
        types = {self._blocks.get_dtype(), self._scales.get_dtype()}
        is_whole = len(shape) == 4 and 2 * shape[3] == _GROUP
        return is_whole and types == {"U8"} and self._scales.get_shape() == shape[:3]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        experts, outputs, groups, _ = self._blocks.get_shape()
        return [experts, groups * _GROUP, outputs]

    def get_dtype(self) -> str:
        """Return the type, which holds each number exactly."""
        return "BF16"

    def __getitem__(self, index: Any) -> np.ndarray:
        parts = (slice(None),) * 3 if index is ... else index
        experts, inputs, outputs = (
            range(*part.indices(size)) for part, size in zip(parts, self.get_shape(), strict=True)
        )
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        kept = slice(inputs.start - groups.start * _GROUP, inputs.stop - groups.start * _GROUP)
        values = np.empty((len(experts), len(inputs), len(outputs)), ml_dtypes.bfloat16)
        # One at a time, as float32 takes eight times the bytes of the file.
        for place, expert in enumerate(experts):
            at = slice(expert, expert + 1), slice(outputs.start, outputs.stop), groups
            exponents = self._scales[at][0].astype(np.int32) - _BIAS
            numbers = _PAIRS[self._blocks[*at, slice(None)][0]].reshape(*exponents.shape, _GROUP)
            numbers *= np.ldexp(np.float32(1), exponents)[..., None]
            values[place] = numbers.reshape(len(outputs), -1)[:, kept].T
        return values
