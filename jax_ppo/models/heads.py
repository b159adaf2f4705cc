"""What stands on the decoder: a language-model head (actor, reference) or a scalar head (critic, reward model).

A role's parameters are the decoder's dict with one entry more:
    lm_head/embedding [V, D] when the output embedding is not the input embedding;
    score/kernel [D, 1] for a scalar head, without a bias.
An actor whose trunk the critic shares has both.
"""

import jax
import jax.numpy as jnp

from jax_ppo.kernels.softcap import softcap
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.transformer import Transformer


def init_params(model: Transformer, key, head: str) -> dict:
    """Random parameters of a role. `head`: "lm", "scalar" (which starts at zero, as a critic must), or "both"."""
    architecture = model.architecture
    key_trunk, key_head = jax.random.split(key)
    one = jnp.zeros((1, 1), jnp.int32)
    anywhere = model.clone(attention="xla")  # splash refuses a row of one token
    params = dict(anywhere.init(key_trunk, one, one, one)["params"])
    if head != "lm":
        params["score"] = {"kernel": jnp.zeros((architecture.hidden_size, 1), jnp.float32)}
    if head != "scalar" and not architecture.tied:
        shape = (architecture.vocab_size, architecture.hidden_size)
        params["lm_head"] = {"embedding": 0.02 * jax.random.normal(key_head, shape, jnp.float32)}
    return params


def without_scalar_head(params: dict) -> dict:
    """A role's parameters, or adapters, but for a scalar head."""
    return {name: value for name, value in params.items() if name != "score"}


def output_embedding(params: dict):
    """The output embedding, [V, D]."""
    return params.get("lm_head", params["embed"])["embedding"]


def compute_logits(architecture: Architecture, params: dict, hidden):
    """[..., V] float32 from [..., D]."""
    weight = output_embedding(params).astype(hidden.dtype)
    product = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
    return softcap(product, architecture.logit_softcap)


def compute_scalars(params: dict, hidden):
    """[...] float32 from [..., D]: the critic's values, or a reward model's scores."""
    weight = params["score"]["kernel"].astype(jnp.float32)
    # Left to themselves, accelerators multiply float32 in fewer bits.
    return jnp.matmul(hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)[
        ..., 0
    ]
