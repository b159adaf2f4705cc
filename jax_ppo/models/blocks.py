"""The types of layers that decoders have, by their names in `architecture.BLOCKS`."""

from typing import NamedTuple

import flax.linen as nn

from jax_ppo.models.layers import Layer, RMSNorm
from jax_ppo.models.ungated import LayerNorm, UngatedLayer


class BlockModules(NamedTuple):
    """The modules of a type of layer.

    Attributes:
      layer: called like `Layer`.
      norm: the norm of the hidden states after the last layer, made of an architecture.
    """

    layer: type[Layer]
    norm: type[nn.Module]


MODULES = {
    "gated": BlockModules(Layer, RMSNorm),
    "ungated": BlockModules(UngatedLayer, LayerNorm),
}
