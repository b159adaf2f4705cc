"""Heads on the decoder: a language-model head, or a scalar head for a critic or reward model.

The parameters of a role are the decoder's dict with one further entry:

    lm_head/embedding [V, D] if the output embedding is not the input embedding
    score/kernel [D, 1] for a scalar head, without a bias

An actor that shares its trunk with the critic has both. A run's critic starts with a head of zeros,
unless `critic.keep_head` keeps that of its checkpoint.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_ppo.kernels.vocabulary_chunks import drop_ids, softcap
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.transformer import Transformer
from jax_ppo.types import Params


def init_params(model: Transformer, key: jax.Array, head: str) -> Params:
    """Return random parameters of a role; a scalar head starts at zero."""
    architecture = model.architecture
    key_trunk, key_head = jax.random.split(key)
    params = model.init(key_trunk)
    if head != "lm":
        params["score"] = {"kernel": jnp.zeros((architecture.hidden_size, 1), jnp.float32)}
    if head != "scalar" and not architecture.tied:
        shape = (architecture.vocab_size, architecture.hidden_size)
        params["lm_head"] = {"embedding": 0.02 * jax.random.normal(key_head, shape, jnp.float32)}
    return params


def param_shapes(model: Transformer, head: str) -> Params:
    """Return the shapes and types of the parameters that `init_params` returns.

    No array is created. A trace takes tens of milliseconds and is cached, because the remedies for
    too little memory ask for the same shapes many times.
    """
    return jax.tree.map(lambda x: x, _traced_shapes(model, head))  # dicts for the caller to change


@functools.cache
def _traced_shapes(model: Transformer, head: str) -> Params:
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(init_params, model, head=head), key)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def without_part(params: Params, part: str) -> Params:
    """Return parameters, adapters or gradients without one part: "score", "lm_head", "layers"."""
    return {name: value for name, value in params.items() if name != part}


def output_embedding(params: Params) -> Float[Array, "V D"]:
    """Return the output embedding, which may be the input embedding."""
    return params.get("lm_head", params["embed"])["embedding"]  # type: ignore[index]


def compute_logits(
    architecture: Architecture, params: Params, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """Return the float32 logits of the next token, divided and soft-capped as the model's are."""
    weight = output_embedding(params).astype(hidden.dtype)
    product = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
    logits = softcap(product / architecture.logit_divisor, architecture.logit_softcap)
    return drop_ids(logits, architecture.num_ids)


def product_scaling(architecture: Architecture, temperature: float) -> tuple[float, float | None]:
    """Return temperature and soft cap for the bare product of hidden states and output embedding.

    Logits are the product x divided by a number s. With a soft cap c and a temperature t,
    c tanh(x / (s c)) / t is (s c) tanh(x / (s c)) / (s t).
    """
    divisor, softcap = architecture.logit_divisor, architecture.logit_softcap
    return divisor * temperature, None if softcap is None else divisor * softcap


def compute_scalars(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return the float32 output of a scalar head: a critic's values or a reward model's scores."""
    # One column of weights: float32 costs next to nothing here.
    weight = params["score"]["kernel"].astype(jnp.float32)
    # By default, accelerators multiply float32 with fewer bits.
    product = jnp.matmul(hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    return product[..., 0]
