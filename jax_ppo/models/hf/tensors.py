"""Description of how one of our parameters is stored in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flax import traverse_util

from jax_ppo.errors import shorten

Path = tuple[str, ...]
T = TypeVar("T")


class Fused(NamedTuple):
    """The place of a parameter in a tensor that holds several, along the axis of their outputs."""

    # For each part of the parameter, its first output (in each group) and its number of outputs.
    parts: tuple[tuple[int, int], ...]
    total: int  # number of the tensor's outputs
    groups: int = 1  # with n, the tensor holds the first n-th of each part, then the second, ...
    groups_here: int = 1  # the same for the parameter

    def outputs(self) -> np.ndarray:
        """Return the place in the tensor of each of the parameter's outputs."""
        starts = np.arange(self.groups)[:, None] * (self.total // self.groups)
        places = [starts + first + np.arange(n // self.groups) for first, n in self.parts]
        in_groups = [part.reshape(self.groups_here, -1) for part in places]
        return np.concatenate(in_groups, axis=1).ravel()


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the checkpoint tensor (or part of one) that holds it."""

    name: str  # of the checkpoint's tensor; the first `{}` is the layer's index, then an expert's
    shape: tuple[int, ...]  # of our parameter in one layer, without the axis of experts
    transposed: bool = False  # the checkpoint has [out, in] where ours is [in, out]
    layers: int | None = None  # stacked along our first axis; `None`: it belongs to no layer
    fused: Fused | None = None  # its place in a tensor that holds several of ours
    # Number of experts, stacked after the axis of layers, a tensor each; `None`: no such axis.
    experts: int | None = None
    layer_numbers: tuple[int, ...] = ()  # indices of these layers in the model; (): all of them
    stacked: bool = False  # the first axis of the shape is that of experts, never reversed

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor."""
        shape = list(self._in_hf_order(self.shape))
        if self.fused is not None:
            shape[self.output_axis] = self.fused.total
        return tuple(shape)

    @property
    def output_axis(self) -> int:
        """Return the axis of the checkpoint's tensor along which a fused one holds parameters."""
        return self._in_hf_order(tuple(range(len(self.shape)))).index(len(self.shape) - 1)

    def read(
        self, read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]
    ) -> np.ndarray:
        """Return a block of our parameter; `index` has its slices, without the axis of layers."""
        hf_index = list(self._in_hf_order(index))
        if self.fused is None:
            return self._transpose(read(tuple(hf_index)))
        axis = self.output_axis
        outputs = self.fused.outputs()[index[-1]]
        # Outputs between the first and the last are read, too.
        first, last = int(outputs.min()), int(outputs.max())
        hf_index[axis] = slice(first, last + 1)
        values = read(tuple(hf_index))
        if not np.array_equal(outputs, np.arange(first, last + 1)):
            values = np.take(values, outputs - first, axis)
        return self._transpose(values)

    def _in_hf_order(self, axes: tuple[T, ...]) -> tuple[T, ...]:
        """Return entries for each axis of our parameter in the order of the checkpoint's axes."""
        if not self.transposed:
            return axes
        return axes[: self.stacked] + axes[self.stacked :][::-1]

    def _transpose(self, values: np.ndarray) -> np.ndarray:
        """Convert between the order of axes of our parameter and that of the checkpoint."""
        return values.transpose(self._in_hf_order(tuple(range(values.ndim))))

    def write(self, values: np.ndarray, tensor: np.ndarray | None) -> np.ndarray:
        """Return the checkpoint's tensor with `values`, this parameter in one layer, written to it.

        `tensor` already has other parameters; `None`: this is the first one.
        """
        values = self._transpose(values)
        if self.fused is None:
            return values
        if tensor is None:
            tensor = np.empty(self.hf_shape, values.dtype)
        np.moveaxis(tensor, self.output_axis, 0)[self.fused.outputs()] = np.moveaxis(
            values, self.output_axis, 0
        )
        return tensor

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of our parameter, including the axis of layers."""
        return self.layer_shape if self.layers is None else (self.layers, *self.layer_shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Return the shape of our parameter in one layer, including the axis of experts."""
        return self.shape if self.experts is None else (self.experts, *self.shape)

    def names(self) -> list[str]:
        """Return the names of the checkpoint's tensors, layer by layer."""
        if self.layers is None:
            return [self.name]
        return [name for layer in range(self.layers) for name in self.layer_names(layer)]

    def layer_names(self, layer: int) -> list[str]:
        """Return the names of the tensors of one of `layers`: one, or one per expert."""
        if self.layer_numbers:
            layer = self.layer_numbers[layer]
        if self.experts is None:
            return [self.name.format(layer)]
        return [self.name.format(layer, expert) for expert in range(self.experts)]


TensorTable = dict[Path, TensorMapping]


def flatten_like(tree: dict[str, Any], rows: Mapping[Path, Any], what: str) -> dict[Path, Any]:
    """Return a nested dict's leaves by path; raise `ValueError` unless they are the table's."""
    flat = traverse_util.flatten_dict(tree)
    for problem, paths in (
        ("it lacks", rows.keys() - flat.keys()),
        ("it should not have", flat.keys() - rows.keys()),
    ):
        if paths:
            listed = shorten(", ".join("/".join(map(str, path)) for path in sorted(paths)), 300)
            raise ValueError(f"{what} is not of this architecture: {problem} {listed}")
    return flat
