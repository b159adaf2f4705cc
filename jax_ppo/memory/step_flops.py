"""Model FLOPs of a step: what its forward passes and updates need, by which MFU is measured."""

import jax
import numpy as np

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.heads import param_shapes
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.layers import LayerKind, layer_kinds
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import programs
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.training.networks import Networks
from jax_ppo.training.optimizer import split_frozen
from jax_ppo.training.roles import ModelRole, find_role


def count_step_flops(
    options: StepOptions, nets: Networks, step: int, prompt_lengths: np.ndarray, lengths: np.ndarray
) -> float:
    """Return the FLOPs of all programs of a step, see `count_program_flops`."""
    flops = count_program_flops(options, nets, prompt_lengths, lengths)
    # During the critic's warm-up the actor's parameters stay.
    if not options.forward.shared_trunk and step < options.update.critic_warmup:
        flops.pop("update_actor", None)
    return sum(flops.values())


def count_program_flops(
    options: StepOptions, nets: Networks, prompt_lengths: np.ndarray, lengths: np.ndarray
) -> dict[str, float]:
    """Return the FLOPs that each program of a step needs that runs a model, by its name.

    Recomputed activations do not count; while sampling, a prompt counts once for its responses. All
    of `ppo_epochs` count, even if `actor.target_kl` cut them short. A reward model with its own
    tokenizer counts as if its inputs were as long as the samples. `prompt_lengths` are int [N].
    `lengths`, int [B], count the tokens of prompt and response; samples of a prompt are adjacent.
    """
    repeated_lengths = np.repeat(prompt_lengths, len(lengths) // len(prompt_lengths))
    num_logits = int((lengths - repeated_lengths).sum())

    def role_passes(role: ModelRole, passes: int) -> float:
        logits = num_logits if role.has_logits else 0
        architecture = role.model(nets).architecture
        return passes * count_forward_flops(architecture, lengths, logits)

    counts: dict[str, float] = {}
    for program in programs.PROGRAMS:
        if not program.runs(options, nets):
            continue
        if program.name == "sample":
            policy = nets.actor.architecture
            flops = count_forward_flops(policy, lengths, num_logits)
            flops -= count_forward_flops(policy, repeated_lengths)
            counts[program.name] = flops + count_forward_flops(policy, prompt_lengths)
        elif program.kind == "forward pass":
            counts[program.name] = sum(
                role_passes(find_role(name), 1) for name in program.forwards(options)
            )
        elif program.kind == "update":
            role, epochs = find_role(program.role), program.epochs(options)
            # The backward pass has a product for the gradient of each product's input and, unless
            # only adapters are trained, one for that of its weights, but for frozen ones.
            training_passes = 3 if role.model(nets).lora is None else 2
            flops = training_passes * role_passes(role, epochs)
            frozen = _frozen_products(getattr(options.update, role.section), role.model(nets))
            flops -= epochs * 2 * frozen * float(lengths.sum())
            for name in program.forwards(options):
                flops += role_passes(find_role(name), epochs)
            counts[program.name] = flops
    return counts


def _frozen_products(section: object, net: Transformer) -> int:
    """Return for how many products of a token, of those with kernels, no gradient is computed."""
    _, frozen = split_frozen(section, param_shapes(net, "scalar"))
    leaves = jax.tree_util.tree_leaves_with_path(frozen)
    return sum(x.size for path, x in leaves if path[-1].key == "kernel")


def count_forward_flops(
    architecture: Architecture | DebertaArchitecture, lengths: np.ndarray, num_logits: int = 0
) -> float:
    """Return the FLOPs of the matrix products of a forward pass over sequences.

    A multiplication and an addition count as two, as in PaLM (arXiv 2204.02311, appendix B). Of the
    experts, those that a token passes through count; of attention, the pairs of tokens that see
    each other. Norms, activations, biases, a scalar head and DeBERTa's relative terms are left out.

    `lengths` are int [B], the tokens of each sequence, and `num_logits` is the number of tokens for
    which logits over the vocabulary are computed.
    """
    lengths = lengths.astype(np.float64)
    if isinstance(architecture, DebertaArchitecture):
        width = architecture.hidden_size
        matrices = 4 * width**2 + 2 * width * architecture.intermediate_size
        per_layer = 2 * matrices * lengths.sum() + 4 * width * (lengths**2).sum()
        return float(architecture.num_layers * per_layer)
    D = architecture.hidden_size
    projections = len(architecture.mlp_projections)
    mlp = projections * D * architecture.active_width
    # The router, and the gate of an expert that every token passes through.
    has_gate = architecture.shared_expert_size > 0 and architecture.shared_expert_gate
    mlp += D * (architecture.num_experts + has_gate)
    # The three products of further embeddings of a layer.
    further = 3 * D * architecture.per_layer_size
    flops = 0.0
    for kind in layer_kinds(architecture):
        if kind.is_linear:
            mixer = _linear_products(architecture)
        else:
            mixer = _attention_products(architecture, kind)
        layer_mlp = projections * D * architecture.dense_size if kind.is_dense else mlp
        flops += 2 * (mixer + layer_mlp + further) * lengths.sum()
        if kind.is_linear:
            continue
        window = architecture.sliding_window if kind.is_local else None
        _, width = architecture.kv_heads(kind.is_local)
        widths = architecture.num_heads * (width + (architecture.value_head_dim or width))
        # The products with keys and with values: two per pair and per number of a head.
        flops += 2 * widths * _visible_pairs(lengths, window)
    return float(flops + 2 * architecture.vocab_size * D * num_logits)


def _attention_products(architecture: Architecture, kind: LayerKind) -> int:
    """Return the products of the projections of attention for a token, of whole sequences."""
    a = architecture
    heads, width = a.kv_heads(kind.is_local)
    D, queries = a.hidden_size, a.num_heads * width
    if not a.latent_size:
        projected = 0 if kind.is_shared else 2 - (a.keys_as_values and not kind.is_local)
        return D * ((2 + a.output_gate) * queries + projected * heads * width)
    values = a.num_heads * a.value_head_dim
    keys = queries - a.num_heads * a.rope_head_dim
    of_queries = a.query_latent_size * queries if a.query_latent_size else D * queries
    latents = a.latent_size + a.rope_head_dim + (a.query_latent_size or 0)
    return D * (latents + values) + of_queries + a.latent_size * (keys + values)


def _linear_products(architecture: Architecture) -> int:
    """Return the products of a short convolution or a Gated DeltaNet for a token.

    The state of a DeltaNet is read twice and changed. Chunks need more products, as many as are
    fastest.
    """
    a = architecture
    if a.block == "convolution":
        return (4 * a.hidden_size + a.delta_window) * a.hidden_size
    channels, values = sum(a.delta_widths), a.delta_widths[2]
    projections = a.hidden_size * (channels + 2 * values + 2 * a.delta_value_heads)
    return projections + 3 * values * a.delta_key_dim


def _visible_pairs(lengths: np.ndarray, window: int | None) -> float:
    """Return how many (query, key) pairs a causal mask shows; each token sees itself."""
    pairs = lengths * (lengths + 1) / 2
    if window is not None:
        hidden = np.maximum(lengths - window, 0)
        pairs = pairs - hidden * (hidden + 1) / 2
    return float(pairs.sum())
