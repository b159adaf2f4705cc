"""Description of how one of our parameters is stored in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from flax import traverse_util

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the checkpoint tensor (or part of one) that holds it.

    Attributes:
      name: Name of the checkpoint's tensor; the first `{}` stands for the layer index, the second
        one for that of an expert.
      shape: Shape of our parameter in one layer, without the axis of experts.
      transposed: Whether the checkpoint stores the axes reversed, [out, in] where ours are
        [in, out].
      layers: Number of layers stacked along the first axis of our parameter; `None` if the
        parameter does not belong to a layer.
      fused: (first row, total rows) if the checkpoint's tensor holds several of our parameters,
        stacked along its first axis.
      experts: Number of experts of a layer, stacked along the axis after that of the layers;
        the checkpoint has a tensor for each. `None` if the parameter does not belong to an expert.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    layers: int | None = None
    fused: tuple[int, int] | None = None
    experts: int | None = None

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.fused is None:
            return shape
        _, total_rows = self.fused
        return (total_rows, *shape[1:])

    def hf_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the index into the checkpoint's tensor that matches `index` into our parameter."""
        index = index[::-1] if self.transposed else index
        if self.fused is None:
            return index
        first_row, _ = self.fused
        own_rows = self.shape[-1] if self.transposed else self.shape[0]
        start, stop, _ = index[0].indices(own_rows)
        return (slice(first_row + start, first_row + stop), *index[1:])

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of our parameter, including the axis of layers."""
        return self.layer_shape if self.layers is None else (self.layers, *self.layer_shape)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of our parameter in one layer, including the axis of experts."""
        return self.shape if self.experts is None else (self.experts, *self.shape)

    def names(self) -> list[str]:
        """Return the names of the checkpoint's tensors, layer by layer."""
        if self.layers is None:
            return [self.name]
        return [name for layer in range(self.layers) for name in self.layer_names(layer)]

    def layer_names(self, layer: int) -> list[str]:
        """Return the names of the tensors of one layer: one, or one per expert."""
        if self.experts is None:
            return [self.name.format(layer)]
        return [self.name.format(layer, expert) for expert in range(self.experts)]


TensorTable = dict[Path, TensorMapping]


def flatten_like(tree: dict[str, Any], rows: Mapping[Path, Any], what: str) -> dict[Path, Any]:
    """Flatten a nested dict to paths and check that these are the paths of a tensor table.

    Args:
      tree: Nested dict in the structure of the parameters.
      rows: The tensor table.
      what: Name of the tree in error messages.

    Returns:
      The leaves of `tree` by path.

    Raises:
      ValueError: The paths differ from those of the table.
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
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
