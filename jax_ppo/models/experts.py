"""Mixture of experts: each token passes through the k experts that a router selects for it.

No token is dropped and no expert has a capacity: the copies of tokens are sorted by expert, and
each projection is one product of groups of rows with as many kernels (`jax.lax.ragged_dot`). TPUs
have an instruction for it; on a CPU JAX multiplies every row with every expert's kernel, zeros
included, which suits small models only.

The router computes in float32 or more, so that programs that round differently rarely select
different experts.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt

from jax_ppo.models.architecture import CORRECTION_BIAS, Architecture
from jax_ppo.models.quantization import converted_kernel
from jax_ppo.runtime.parallelism.experts import run_on_own_rows, split_experts

# Computes the input of the last projection from the outputs of gate_proj and up_proj.
Gate = Callable[[jax.Array, jax.Array], jax.Array]
# By name: `kernel` [E, in, out], for int8 `kernel_scale` [E, out], and perhaps `bias` [E, out].
Projections = dict[str, dict[str, jax.Array]]


class Kernel(nn.Module):
    """A kernel without its product, int8 with a scale per column in decoding (quantization.py)."""

    shape: tuple[int, ...]
    use_bias: bool = False

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        """Return the kernel and, if there are any, its scale and bias, by name."""
        if not self.is_initializing():
            # In decoding, a device may have fewer experts than `shape` says.
            return dict(self.variables["params"])
        init = nn.initializers.normal(0.02)
        parts = {"kernel": self.param("kernel", init, self.shape, jnp.float32)}
        if self.use_bias:
            shape = (*self.shape[:-2], self.shape[-1])
            parts["bias"] = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return parts


class Experts(nn.Module):
    """The projections of all experts of a layer."""

    architecture: Architecture

    @nn.compact
    def __call__(self) -> Projections:
        """Return the projections by name."""
        a = self.architecture
        E, D, width = a.num_experts, a.hidden_size, a.intermediate_size
        shapes = {"gate_proj": (E, D, width), "up_proj": (E, D, width), "down_proj": (E, width, D)}
        return {name: Kernel(shape, a.mlp_bias, name=name)() for name, shape in shapes.items()}


class ExpertMLP(nn.Module):
    """A router and its experts, in the place of the MLP."""

    architecture: Architecture
    dtype: DTypeLike  # type of the experts' computation
    gate: Gate  # joins the outputs of the experts' first two projections
    router_loss: bool = False  # `balance_losses` is returned as "router_loss"
    returns_routed_experts: bool = False  # the selected ones are returned as "routed_experts"

    @nn.compact
    def __call__(
        self,
        x_RxLxD: jax.Array,
        segments_RxL: jax.Array | None,
        routed_experts_RxLxk: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output [R, L, D] and auxiliary outputs by name; see `select_experts`."""
        a = self.architecture
        router = Kernel((a.hidden_size, a.num_experts), a.mlp_bias, name="router")()
        wide = jnp.promote_types(x_RxLxD.dtype, jnp.float32)
        router = {name: x.astype(wide) for name, x in router.items()}
        # By default, accelerators multiply float32 with fewer bits.
        precision = jax.lax.Precision.HIGHEST
        logits = jnp.matmul(x_RxLxD.astype(wide), router["kernel"], precision=precision)
        if a.mlp_bias:
            logits += router["bias"]
        probabilities = jax.nn.sigmoid(logits) if a.sigmoid_router else jax.nn.softmax(logits)
        correction = None
        if a.sigmoid_router:
            zeros = nn.initializers.zeros
            correction = self.param(CORRECTION_BIAS, zeros, (a.num_experts,), jnp.float32)
        # A group's value is the sum of its best two experts' in DeepSeek-V3, its best one's in V2.
        limit = functools.partial(
            limit_to_groups,
            groups=a.router_groups,
            selected=a.groups_per_token,
            counted=2 if a.sigmoid_router else 1,
        )
        weights, experts = select_experts(
            probabilities,
            a.experts_per_token,
            a.normalized_expert_weights,
            routed_experts_RxLxk,
            correction=correction,
            limit=limit,
        )
        weights *= a.routed_scale
        auxiliary = {}
        if self.returns_routed_experts:
            auxiliary["routed_experts"] = experts.astype(routed_experts_dtype(a.num_experts))
        if self.router_loss:
            assert segments_RxL is not None, "the balance is that of a segment"
            if a.sigmoid_router:
                probabilities /= probabilities.sum(-1, keepdims=True)
            auxiliary["router_loss"] = balance_losses(probabilities, experts, segments_RxL)
        projections = Experts(a, name="experts")()
        compute = functools.partial(run_experts, dtype=self.dtype, gate=self.gate)
        return split_experts(compute)(x_RxLxD, weights, experts, projections), auxiliary


def routed_experts_dtype(num_experts: int) -> DTypeLike:
    """Return the smallest type that holds the indices of experts, and one more: E itself."""
    return jnp.uint8 if num_experts < 2**8 else jnp.uint16


def select_experts(
    probabilities: Float[Array, "R L E"],
    k: int,
    is_normalized: bool,
    routed_experts: UInt[Array, "R L k"] | None = None,
    *,
    correction: Float[Array, " E"] | None = None,
    limit: Callable[[jax.Array], jax.Array] = lambda probabilities: probabilities,
) -> tuple[Float[Array, "R L k"], Int[Array, "R L k"]]:
    """Return the weights and indices of the experts of each token.

    They are the k most probable ones, or those that were recorded in another pass (routing replay;
    Ma et al. 2025, arXiv 2510.11370). In both cases their weights are computed from the present
    probabilities, and have a gradient: normalized ones are a softmax over the k experts.

    Args:
      probabilities: the probability of each expert for each token.
      k: number of experts of each token.
      is_normalized: whether the weights of a token are divided by their sum.
      routed_experts: the recorded experts, E and above where there is no record.
      correction: added to the probabilities to select experts, not in their weights: it balances
        them without a loss (Wang et al. 2024, arXiv 2408.15664), and has no gradient.
      limit: lowers the sums of experts that a token may not select, as `limit_to_groups` does.
    """
    corrected = probabilities if correction is None else probabilities + correction
    # A compiler would gather the probabilities of all devices to sort them.
    experts = run_on_own_rows(
        lambda x: jax.lax.top_k(limit(x), k)[1], jax.lax.stop_gradient(corrected)
    )
    if routed_experts is not None:
        is_recorded = routed_experts < probabilities.shape[-1]
        experts = jnp.where(is_recorded, routed_experts.astype(experts.dtype), experts)
    # A recorded expert need not be among the k most probable.
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if is_normalized:
        # Sigmoids may all be 0. Any other sum is too large for the addend to change it.
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return weights, experts


def limit_to_groups(
    probabilities: Float[Array, "R L E"], groups: int, selected: int, counted: int
) -> Float[Array, "R L E"]:
    """Return the probabilities of experts in the best groups, minus infinity for the others.

    DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) and V3 (arXiv 2412.19437, section 2.1.2).

    A group has E / `groups` consecutive experts, and each token selects `selected` groups: those
    with the greatest sum over their best `counted` experts. Probabilities may be corrected ones.
    """
    if selected == groups:
        return probabilities
    R, L, E = probabilities.shape
    by_group = probabilities.reshape(R, L, groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(by_group, counted)[0].sum(-1), selected)[1]
    is_selected = jax.nn.one_hot(best, groups, dtype=jnp.bool_).any(-2)
    return jnp.where(is_selected[..., None], by_group, -jnp.inf).reshape(R, L, E)


def balance_losses(
    probabilities_RxLxE: Float[Array, "R L E"],
    experts_RxLxk: Int[Array, "R L k"],
    segments_RxL: Int[Array, "R L"],
) -> Float[Array, "R L"]:
    """Return each token's term of a load-balancing loss, k if all experts are used alike.

    For token t of sequence s it is E sum_e f_se p_te. f_se is the number of times that expert e was
    selected per token of s, k / E on average; it has no gradient. The mean of the terms over s is
    the loss of Switch Transformer (arXiv 2101.03961, equation 4) within one sequence, as in
    DeepSeek-V2 and V3 (arXiv 2412.19437, equation 17). `segments_RxL` numbers the sequence that
    each token belongs to, which has no gap.
    """
    R, L, E = probabilities_RxLxE.shape
    # Segments are numbered from 0 in each row, whatever their names.
    begins = segments_RxL[:, 1:] != segments_RxL[:, :-1]
    number_RxL = jnp.pad(jnp.cumsum(begins, axis=1), ((0, 0), (1, 0)))
    counts_RxLxE = jax.nn.one_hot(experts_RxLxk, E, dtype=probabilities_RxLxE.dtype).sum(-2)
    segment_sums = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=L))
    totals_RxLxE = segment_sums(counts_RxLxE, number_RxL)
    lengths_RxL = segment_sums(jnp.ones((R, L), totals_RxLxE.dtype), number_RxL)
    shares_RxLxE = totals_RxLxE / jnp.maximum(lengths_RxL, 1)[..., None]
    token_shares_RxLxE = jnp.take_along_axis(shares_RxLxE, number_RxL[..., None], axis=1)
    return E * jnp.sum(token_shares_RxLxE * probabilities_RxLxE, axis=-1)


def run_experts(
    x_RxLxD: jax.Array,
    weights_RxLxk: jax.Array,
    experts_RxLxk: jax.Array,
    projections: Projections,
    first_expert: jax.Array | None = None,
    *,
    dtype: DTypeLike,
    gate: Gate,
) -> jax.Array:
    """Return the weighted sum of the experts' outputs for each token, [R, L, D] in `dtype`.

    `projections` belong to consecutive experts from `first_expert` on; others add nothing.
    """
    k = experts_RxLxk.shape[-1]
    D = x_RxLxD.shape[-1]
    num_experts = len(projections["down_proj"]["kernel"])
    expert_N = experts_RxLxk.reshape(-1)
    if first_expert is not None:
        # The places of other experts come last, in no group.
        expert_N = expert_N - first_expert
        is_present_N = (expert_N >= 0) & (expert_N < num_experts)
        expert_N = jnp.where(is_present_N, expert_N, num_experts)
    # Each token has k places among the N; places are sorted by expert.
    order_N = jnp.argsort(expert_N, stable=True)
    group_sizes = jnp.bincount(expert_N, length=num_experts).astype(jnp.int32)
    sorted_N = expert_N[order_N]

    def project(name: str, rows: jax.Array) -> jax.Array:
        kernel = converted_kernel(projections[name]["kernel"], rows, dtype)
        out = jax.lax.ragged_dot(rows, kernel, group_sizes)
        if "kernel_scale" in projections[name]:
            out = (out * projections[name]["kernel_scale"][sorted_N]).astype(dtype)
        if "bias" in projections[name]:
            # Rows in no group have none, and add nothing to its gradient.
            bias = projections[name]["bias"].astype(dtype)
            out += bias.at[sorted_N].get(mode="fill", fill_value=0)
        return out

    x_NxD = x_RxLxD.reshape(-1, D).astype(dtype)[order_N // k]
    if first_expert is not None:
        # The products of rows in no group are undefined, and so are their gradients.
        x_NxD = jnp.where((sorted_N < num_experts)[:, None], x_NxD, 0)
    hidden = gate(project("gate_proj", x_NxD), project("up_proj", x_NxD))
    out_NxD = project("down_proj", hidden)[jnp.argsort(order_N)]
    if first_expert is not None:
        out_NxD = jnp.where(is_present_N[:, None], out_NxD, 0)
    # The places of each token are summed with at least the bits of the weights.
    places = out_NxD.reshape(*experts_RxLxk.shape, D)
    places = places.astype(weights_RxLxk.dtype)
    return jnp.einsum("rlkd,rlk->rld", places, weights_RxLxk).astype(dtype)
