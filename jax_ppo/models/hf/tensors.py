"""Description of how one of our parameters is stored in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flax import traverse_util

Path = tuple[str, ...]
T = TypeVar("T")


class Fused(NamedTuple):
    """The place of a parameter in a tensor that holds several, along the axis of their outputs.

    Attributes:
      first: its first output in the tensor, or in each of its groups.
      total: number of the tensor's outputs.
      groups: with n, the tensor holds the first n-th of each parameter, then the second, ...
    """

    first: int
    total: int
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the checkpoint tensor (or part of one) that holds it.

    Attributes:
      name: name of the checkpoint's tensor; the first `{}` stands for the layer index, the second
        one for that of an expert.
      shape: shape of our parameter in one layer, without the axis of experts.
      transposed: whether the checkpoint stores the axes reversed, [out, in] where ours are
        [in, out].
      layers: number of layers stacked along the first axis of our parameter; `None` if the
        parameter does not belong to a layer.
      layer_numbers: the index of each of these layers among all layers of the model; (): they are
        all of them.
      fused: where the parameter is in a checkpoint's tensor that holds several of ours.
      experts: number of experts of a layer, stacked along the axis after that of the layers;
        the checkpoint has a tensor for each. `None` if the parameter does not belong to an expert.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    layers: int | None = None
    fused: Fused | None = None
    experts: int | None = None
    layer_numbers: tuple[int, ...] = ()

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor."""
        shape = self._in_hf_order(self.shape)
        if self.fused is None:
            return shape
        axis = self.output_axis
        return (*shape[:axis], self.fused.total, *shape[axis + 1 :])

    @property
    def output_axis(self) -> int:
        """Return the axis of the checkpoint's tensor along which a fused one holds parameters."""
        if self.transposed:
            return 0
        return len(self.shape) - 1

    def read(
        self, read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]
    ) -> np.ndarray:
        """Return a block of our parameter.

        Args:
          read: reads a block of the checkpoint's tensor.
          index: one slice per axis of our parameter, without the axis of layers.
        """
        hf_index = list(self._in_hf_order(index))
        if self.fused is None:
            return self._transpose(read(tuple(hf_index)))
        axis = self.output_axis
        outputs = self._fused_outputs(index[-1])
        # What lies between the first and the last is read, too.
        first = int(outputs[0])
        last = int(outputs[-1])
        hf_index[axis] = slice(first, last + 1)
        values = read(tuple(hf_index))
        if len(outputs) < last + 1 - first:
            values = np.take(values, outputs - first, axis)
        return self._transpose(values)

    def _in_hf_order(self, axes: tuple[T, ...]) -> tuple[T, ...]:
        """Return entries for each axis of our parameter in the order of the checkpoint's axes."""
        if self.transposed:
            return axes[::-1]
        return axes

    def _transpose(self, values: np.ndarray) -> np.ndarray:
        """Convert between the order of axes of our parameter and that of the checkpoint."""
        if self.transposed:
            return values.T
        return values

    def _fused_outputs(self, block: slice) -> np.ndarray:
        """Return the indices of some of our outputs in a fused tensor, in ascending order."""
        assert self.fused is not None
        first, total, groups = self.fused
        width = self.shape[-1] // groups
        outputs = np.arange(self.shape[-1])[block]
        return outputs // width * (total // groups) + first + outputs % width

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the checkpoint's tensor of the parameters, in order, that it holds."""
        values = [self._transpose(part) for part in parts]
        if self.fused is None:
            return values[0]
        axis = self.output_axis
        groups = self.fused.groups
        if groups == 1:
            return np.concatenate(values, axis)
        # [.., groups, width, ..] next to each other.
        split = [
            value.reshape(*value.shape[:axis], groups, -1, *value.shape[axis + 1 :])
            for value in values
        ]
        return np.concatenate(split, axis + 1).reshape(self.hf_shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of our parameter, including the axis of layers."""
        if self.layers is None:
            return self.layer_shape
        return (self.layers, *self.layer_shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Return the shape of our parameter in one layer, including the axis of experts."""
        if self.experts is None:
            return self.shape
        return (self.experts, *self.shape)

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
    """Flatten a nested dict to paths and check that these are the paths of a tensor table.

    Args:
      tree: nested dict in the structure of the parameters.
      rows: the tensor table.
      what: name of the tree in error messages.

    Returns:
      The leaves of `tree` by path.

    Raises:
      ValueError: the paths differ from those of the table.
    """
    flat = traverse_util.flatten_dict(tree)
    missing = sorted(rows.keys() - flat.keys())
    unknown = sorted(flat.keys() - rows.keys())
    problems = [
        f"{problem} {abbreviate('/'.join(map(str, path)) for path in paths)}"
        for problem, paths in (("it lacks", missing), ("it should not have", unknown))
        if paths
    ]
    if problems:
        raise ValueError(
            f"{what} does not have the structure of this architecture's parameters: "
            f"{'; '.join(problems)}"
        )
    return flat


def abbreviate(names: Iterable[str]) -> str:
    """Join the first few names for an error message."""
    names = list(names)
    shown = names[:6]
    if len(names) > 6:
        shown.append("...")
    return ", ".join(shown)
