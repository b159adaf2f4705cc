"""The KL estimators that options name: built-in kinds, or user-defined functions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.config import plugins
from jax_ppo.errors import UserError

Estimator = Callable[[jax.Array], jax.Array]


def get_kl_estimator(name: str, option: str) -> str | Estimator:
    """Return what `kernels.kl.kl_estimate` takes for the value of an option.

    A user-defined function gets d = log actor(token) - log reference(token), of any shape and
    0 at tokens that do not count, and returns one number per token. In the loss it is
    differentiated through d.

    Raises:
      UserError: a `module:function` that cannot be loaded; when it is called, a result of another
        shape.
    """
    if ":" not in name:
        return name
    function = plugins.load_plugin(name, option, ("log_ratio",), by_name=False)

    def estimate(log_ratio: jax.Array) -> jax.Array:
        result = function(log_ratio)
        if jnp.shape(result) != log_ratio.shape:
            raise UserError(
                f"config.{option}={name!r}: returned shape {jnp.shape(result)}; expected one "
                f"number per token, {log_ratio.shape}"
            )
        return jnp.asarray(result, jnp.float32)

    return estimate
