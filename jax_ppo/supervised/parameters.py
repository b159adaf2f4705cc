"""The arrays that supervised training changes: the model's parameters and the optimizer state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ppo.config.schema import Supervised
from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.training.optimizer import make_optimizer


def trained_shapes(
    options: Supervised, model: Transformer, head: str, mesh: Mesh
) -> dict[str, Any]:
    """Return shapes and shardings of parameters and optimizer state, as a checkpoint names them.

    Args:
      options: the section of the config.
      model: the network.
      head: "lm" or "scalar".
      mesh: the run's mesh.

    Returns:
      Trees of `jax.ShapeDtypeStruct` under "params" and "optimizer".
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    initial = jax.eval_shape(functools.partial(heads.init_params, model, head=head), key)
    dtype = jnp.dtype(options.optim.param_dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), initial)
    init_optimizer = make_optimizer(options.optim, options.grad_clip).init
    shapes = {"params": params, "optimizer": jax.eval_shape(init_optimizer, params)}
    layouts = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), shapes, layouts
    )
