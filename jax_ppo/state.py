"""The train state: every parameter tree and what goes with it, and how the trained ones move."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from jax_ppo import config as config_lib
from jax_ppo import schema, sharding
from jax_ppo.models import attention, heads, hf_import
from jax_ppo.models.transformer import Transformer
from jax_ppo.types import pytree


@pytree
class TrainState:
    """One pytree on the mesh.

    Attributes:
      step: int32 scalar, steps done.
      actor, critic: trained parameters, float32.
      reference: frozen copy of the first actor in the computation's type; None when nothing needs it.
      reward: frozen reward model's parameters; None without one.
      actor_optimizer, critic_optimizer: optax states.
      kl_coef: float32 scalar, the coefficient of the KL in the reward, as the controller left it.
    """

    step: Any
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    actor_optimizer: Any
    critic_optimizer: Any
    kl_coef: Any


@dataclasses.dataclass(frozen=True)
class Networks:
    """The decoders that the parameter trees belong to; a static argument of compiled functions. The reference is an actor."""

    actor: Transformer
    critic: Transformer
    reward: Transformer | None


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where each role's checkpoint lies, in Hugging Face's format. `reward` is None without a reward model."""

    actor: Path
    critic: Path
    reward: Path | None


def networks(config: schema.Config, folders: Folders) -> Networks:
    """Reads each role's config.json. Raises ValueError for an architecture that is not supported, ConfigError for an attention
    program that cannot run here."""
    dtype, platform = jnp.dtype(config.model.dtype), _platform()

    def network(folder):
        architecture = hf_import.read_architecture(folder)
        try:
            program = attention.choose(config.model.attention, platform, dtype, architecture.head_dim, config.row_length)
        except ValueError as obstacle:
            raise config_lib.ConfigError(f"config.model.attention={config.model.attention!r}: {obstacle}; set 'auto'") from None
        return Transformer(architecture, dtype, remat=config.model.gradient_checkpointing, attention=program)

    return Networks(network(folders.actor), network(folders.critic), folders.reward and network(folders.reward))


def _platform() -> str:
    """cpu, cuda, rocm or tpu."""
    backend = jax.extend.backend.get_backend()
    return backend.platform_version.split()[0] if backend.platform == "gpu" else backend.platform


def trained_shapes(config: schema.Config, nets: Networks, mesh) -> dict[str, Any]:
    """ShapeDtypeStructs, with shardings, of all that training changes: the keys and trees of a checkpoint."""
    actor, critic = _init_shapes(nets.actor, "lm"), _init_shapes(nets.critic, "scalar")
    optimizers = {
        "actor": jax.eval_shape(optimizer(config.actor.optim, config.actor.grad_clip).init, actor),
        "critic": jax.eval_shape(optimizer(config.critic.optim, config.critic.grad_clip).init, critic),
    }
    return _placed({"actor": actor, "critic": critic, "optimizer": optimizers}, mesh)


def shapes(config: schema.Config, nets: Networks, mesh) -> TrainState:
    """ShapeDtypeStructs, with shardings, of what `create` gives."""
    trained, frozen_type = trained_shapes(config, nets, mesh), jnp.dtype(config.model.dtype)

    def frozen(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, frozen_type, sharding=x.sharding), tree)

    def scalar(dtype):
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding.replicated(mesh))

    return TrainState(scalar(jnp.int32), trained["actor"], trained["critic"],
                      frozen(trained["actor"]) if config.algorithm.use_reference else None,
                      None if nets.reward is None else frozen(_placed(_init_shapes(nets.reward, "scalar"), mesh)),
                      trained["optimizer"]["actor"], trained["optimizer"]["critic"], scalar(jnp.float32))


def _init_shapes(net: Transformer, head: str):
    return jax.eval_shape(functools.partial(heads.init, net, head=head), jax.random.key(0))


def _placed(tree, mesh):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree,
                        sharding.tree_shardings(mesh, tree, sharding.TRAIN_RULES))


def create(config: schema.Config, nets: Networks, folders: Folders, mesh,
           progress: Callable[[str], Callable[[int, int], None]], trained: dict[str, Any] | None = None, step: int = 0,
           kl_coef: float | None = None) -> TrainState:
    """The state to start from, each tree read straight into its shards.

    Args:
      progress: gives for a role's name what `hf_import.load` reports to.
      trained: arrays of the form of `trained_shapes`, from a checkpoint; None reads the roles' folders.
      step, kl_coef: from the same checkpoint.
    """
    places = jax.tree.map(lambda x: x.sharding, shapes(config, nets, mesh))
    frozen_type = jnp.dtype(config.model.dtype)

    def load(role, folder, net, where, head, dtype=jnp.float32):
        return hf_import.load(folder, net.architecture, where, dtype, head, progress(role))

    if trained is None:
        actor = load("actor", folders.actor, nets.actor, places.actor, "lm")
        critic = load("critic", folders.critic, nets.critic, places.critic, "scalar")

        def init(options, params, where):
            return jax.jit(optimizer(options.optim, options.grad_clip).init, out_shardings=where)(params)

        optimizers = {"actor": init(config.actor, actor, places.actor_optimizer),
                      "critic": init(config.critic, critic, places.critic_optimizer)}
        trained = {"actor": actor, "critic": critic, "optimizer": optimizers}
    reference = reward = None
    if config.algorithm.use_reference:
        reference = load("reference", folders.actor, nets.actor, places.actor, "lm", frozen_type)
    if folders.reward:
        reward = load("reward model", folders.reward, nets.reward, places.reward, "reward", frozen_type)
    kl_coef = config.algorithm.kl_ctrl.kl_coef if kl_coef is None else kl_coef
    scalars = sharding.place((np.int32(step), np.float32(kl_coef)), sharding.replicated(mesh))
    return TrainState(scalars[0], trained["actor"], trained["critic"], reference, reward, trained["optimizer"]["actor"],
                      trained["optimizer"]["critic"], scalars[1])


def optimizer(options: schema.Optim, grad_clip: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) after clipping by global norm, without the learning rate, which `descend` applies."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=_matrices),
    )


def _matrices(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def learning_rate(options: schema.Optim, step, total_steps: int):
    """Rate of a step: linear warm-up from lr / lr_warmup_steps, then constant, linear or cosine down to min_lr_ratio.

    Args:
      step: int scalar, steps that trained this model before, from 0.
      total_steps: such steps in all.
    """
    warm = options.lr_warmup_steps
    decay_steps = max(total_steps - warm, 1)
    schedules = {
        "constant": optax.constant_schedule(options.lr),
        "linear": optax.linear_schedule(options.lr, options.lr * options.min_lr_ratio, decay_steps),
        "cosine": optax.cosine_decay_schedule(options.lr, decay_steps, alpha=options.min_lr_ratio),
    }
    rising = options.lr * (step + 1) / max(warm, 1)
    return jnp.where(step < warm, rising, schedules[options.lr_schedule](jnp.maximum(step - warm, 0)))


def descend(transform: optax.GradientTransformation, params, opt_state, gradients, rate, learns=True):
    """One optimizer step, left out where the gradient is not finite or `learns` is False: nothing moves then, not a bit.

    Returns:
      new parameters, new optimizer state, the gradient's global norm before clipping, and whether it was finite.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    updates, moved = transform.update(gradients, opt_state, params)
    stepped = jax.tree.map(lambda p, u: p - rate * u, params, updates)

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite & learns, n, o), new, old)

    return keep(stepped, params), keep(moved, opt_state), norm, finite
