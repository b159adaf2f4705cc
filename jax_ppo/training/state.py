"""The train state: every parameter tree and what goes with it, and how the trained ones move."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from jax_ppo.config import parsing, schema
from jax_ppo.errors import UserError
from jax_ppo.kernels import moments, schedules
from jax_ppo.models import attention, cache, heads
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.deberta.encoder import Deberta, init_deberta_params
from jax_ppo.models.hf.load import load_checkpoint, read_architecture, read_reward_architecture
from jax_ppo.models.hf.peft import (
    ADAPTER_CONFIG,
    holds_adapters,
    load_adapters,
    read_adapter_config,
    validate_adapters,
)
from jax_ppo.models.lora import Lora, init_adapters, join_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.storage import hub
from jax_ppo.types import Control, pytree

log = logging.getLogger(__name__)

ADAPTER_STREAMS = {
    "actor": 3,
    "critic": 4,
}  # of random numbers, beside those that samples are drawn from (experiment.py)


@pytree
class TrainState:
    """One pytree on the mesh.

    Attributes:
      step: int32 scalar, steps done.
      actor, critic: trained parameters, float32; no critic (None) where advantages need none, or where it is a scalar head of
        the actor's (critic.shared_trunk). With model.lora they are adapters (models/lora.py), and the critic's head.
      reference: frozen copy of the first actor in the computation's type; None when nothing needs it. With model.lora it is the
        bare base, the one copy that adapters stand on.
      reward: frozen reward model's parameters, or adapters on the same base; None without one.
      actor_optimizer, critic_optimizer: optax states; None without the critic.
      control: KL coefficient and running moments, for the coming step.
    """

    step: Any
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    actor_optimizer: Any
    critic_optimizer: Any
    control: Control


@dataclasses.dataclass(frozen=True)
class Networks:
    """The models that the parameter trees belong to; a static argument of compiled functions. The reference is an actor.

    Where a model says `lora`, the role's tree is of adapters: `whole` puts them on the base, which is the reference.
    """

    actor: Transformer
    critic: Transformer | None
    reward: Transformer | Deberta | None


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where each role's checkpoint lies, in Hugging Face's format; None for a role that the run has not.

    With model.lora `actor` holds the base, `adapters` those that the actor starts from (None: new ones), and critic and reward
    may hold adapters too; a critic in the actor's folder starts with the actor's.
    """

    actor: Path
    critic: Path | None
    reward: Path | None
    adapters: Path | None = None

    @property
    def critic_starts_as_actor(self) -> bool:
        return self.critic is not None and self.critic.resolve() == self.actor.resolve()


def networks(config: schema.Config, folders: Folders) -> Networks:
    """Reads each role's config.json. Raises UserError for an architecture that is not supported, for a reward model that
    is none, and for an attention program that cannot run here."""
    dtype, platform = jnp.dtype(config.model.dtype), _platform()

    def network(folder, read=read_architecture):
        architecture = read(folder)
        if isinstance(architecture, DebertaArchitecture):
            return Deberta(architecture, dtype)
        try:
            program = attention.select_attention_program(
                config.model.attention,
                platform,
                dtype,
                architecture.head_dim,
                config.row_length,
                architecture.attention_softcap,
            )
        except ValueError as obstacle:
            raise UserError(
                f"config.model.attention={config.model.attention!r}: {obstacle}; set 'auto'"
            ) from None
        return Transformer(
            architecture, dtype, remat=config.model.gradient_checkpointing, attention=program
        )

    actor, critic = network(folders.actor), None
    try:
        actor = actor.clone(
            decoding=cache.select_cache_program(
                config.rollout.attention,
                platform,
                actor.attention,
                actor.architecture,
                config.sequence_length,
            )
        )
    except ValueError as obstacle:
        raise UserError(
            f"config.rollout.attention={config.rollout.attention!r}: {obstacle}; set 'auto'"
        ) from None
    if config.has_adapters:
        actor = actor.clone(lora=_lora(config, folders, actor.architecture))

    def on_base(folder, option, head):  # the actor's model with other adapters
        return actor.clone(
            lora=_read_adapters(config, folders, folder, actor.architecture, option, head)
        )

    head = "reward" if config.critic.keep_head else "scalar"
    if folders.critic and not config.has_adapters:
        critic = network(
            folders.critic,
            _read_with_head if config.critic.keep_head else read_architecture,
        )
        if isinstance(critic, Deberta):
            raise UserError(
                f"config.critic.path={config.critic.path!r}: is an encoder, which sees a response's "
                "end from its start; a critic must be a decoder"
            )
    elif folders.critic_starts_as_actor and not config.critic.keep_head:
        critic = actor
    elif folders.critic:
        critic = on_base(folders.critic, "config.critic.path", head)
    if folders.reward and config.has_adapters and holds_adapters(folders.reward):
        reward = on_base(folders.reward, "config.reward.model_path", "reward")
    else:
        reward = folders.reward and network(folders.reward, read_reward_architecture)
    return Networks(actor, critic, reward)


def _lora(config: schema.Config, folders: Folders, architecture) -> Lora:
    """Of the actor's adapters."""
    options = config.model.lora
    if folders.adapters:
        return _read_adapters(
            config, folders, folders.adapters, architecture, "config.model.lora.path", "lm"
        )
    return Lora(options.rank, options.alpha, parsing.parse_lora_targets(options.targets))


def _read_with_head(folder):
    try:
        return read_reward_architecture(folder)
    except UserError as error:
        raise UserError(
            f"config.critic.keep_head=True: config.critic.path has no head to keep: {error}"
        ) from None


def _read_adapters(config, folders, folder, architecture, option, head) -> Lora:
    """Raises UserError where they are not adapters on the actor's base."""
    if not holds_adapters(folder):
        raise UserError(
            f"{option}: {folder} holds no adapters ({ADAPTER_CONFIG}); with config.model.lora they must "
            "stand on config.model.path's weights, which all roles share"
        )
    lora, base = read_adapter_config(folder)
    said = (
        f"the adapters in {folder} stand on {base!r} (base_model_name_or_path in {ADAPTER_CONFIG})"
    )
    if base and Path(base).is_dir() and Path(base).resolve() != folders.actor.resolve():
        raise UserError(
            f"{option}: {said}, not on config.model.path={config.model.path!r}; set that, or where it "
            "is the same model in another folder, the field"
        )
    if base and not Path(base).is_dir() and base != hub.split_revision(config.model.path)[0]:
        log.warning(
            "%s: %s, which should be config.model.path=%r under another name",
            option,
            said,
            config.model.path,
        )
    validate_adapters(folder, architecture, lora, head)
    return lora


def actor_head(config: schema.Config) -> str:
    """What stands on the actor's trunk, as `heads.init_params` and `load_checkpoint` name it."""
    return "both" if config.shares_trunk else "lm"


def whole(net: Transformer | Deberta, params, base):
    """All that `net` runs on: `params`, on the base where they are adapters (`base`: the state's reference)."""
    return params if getattr(net, "lora", None) is None else join_adapters(base, params)


def _platform() -> str:
    """cpu, cuda, rocm or tpu."""
    backend = jax.extend.backend.get_backend()
    return backend.platform_version.split()[0] if backend.platform == "gpu" else backend.platform


def trained_shapes(config: schema.Config, nets: Networks, mesh) -> dict[str, Any]:
    """ShapeDtypeStructs, with shardings, of all that training changes: the keys and trees of a checkpoint."""
    params = {"actor": _init_shapes(nets.actor, actor_head(config))}
    if nets.critic:
        params["critic"] = _init_shapes(nets.critic, "scalar")
    optimizers = {
        role: jax.eval_shape(_optimizer(config, role).init, tree) for role, tree in params.items()
    }
    control = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)),
        jax.eval_shape(lambda: first_control(config)),
    )
    return _placed(params | {"optimizer": optimizers}, mesh) | {"control": control}


def shapes(config: schema.Config, nets: Networks, mesh) -> TrainState:
    """ShapeDtypeStructs, with shardings, of what `create` gives."""
    trained, frozen_type = trained_shapes(config, nets, mesh), jnp.dtype(config.model.dtype)

    def frozen(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, frozen_type, sharding=x.sharding), tree
        )

    return TrainState(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding.replicated(mesh)),
        trained["actor"],
        trained.get("critic"),
        frozen(_placed(_base_shapes(nets.actor, "lm"), mesh)) if config.keeps_reference else None,
        None if nets.reward is None else frozen(_placed(_init_shapes(nets.reward, "scalar"), mesh)),
        trained["optimizer"]["actor"],
        trained["optimizer"].get("critic"),
        trained["control"],
    )


def _init_shapes(net: Transformer | Deberta, head: str):
    if isinstance(net, Deberta):  # with a head of its own
        return jax.eval_shape(functools.partial(init_deberta_params, net), jax.random.key(0))
    if net.lora is not None:
        return jax.eval_shape(
            functools.partial(init_adapters, net.architecture, net.lora, head=head),
            jax.random.key(0),
        )
    return _base_shapes(net, head)


def _base_shapes(net: Transformer, head: str):
    return jax.eval_shape(functools.partial(heads.init_params, net, head=head), jax.random.key(0))


def _placed(tree, mesh):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        tree,
        sharding.tree_shardings(mesh, tree, sharding.TRAIN_RULES),
    )


def trained(state: TrainState) -> dict[str, Any]:
    """All of a state that training changes, in the form of `trained_shapes`."""
    roles = {
        "actor": (state.actor, state.actor_optimizer),
        "critic": (state.critic, state.critic_optimizer),
    }
    roles = {role: trees for role, trees in roles.items() if trees[0] is not None}
    return {role: params for role, (params, _) in roles.items()} | {
        "optimizer": {role: optimizer for role, (_, optimizer) in roles.items()},
        "control": state.control,
    }


def create(
    config: schema.Config,
    nets: Networks,
    folders: Folders,
    mesh,
    progress: Callable[[str], Callable[[int, int], None]],
    trained: dict[str, Any] | None = None,
    step: int = 0,
) -> TrainState:
    """The state to start from, each tree read straight into its shards.

    Args:
      progress: gives for a role's name what `load_checkpoint` reports to.
      trained: arrays of the form of `trained_shapes`, from a checkpoint; None reads the roles' folders.
      step: from the same checkpoint.
    """
    places = jax.tree.map(lambda x: x.sharding, shapes(config, nets, mesh))
    frozen_type = jnp.dtype(config.model.dtype)

    def load(role, folder, net, where, head, dtype=jnp.float32):
        if getattr(net, "lora", None) is None:
            return load_checkpoint(folder, net.architecture, where, dtype, head, progress(role))
        if folder is None:
            return _new_adapters(net, where, head, config.seed, role)
        return load_adapters(
            folder, net.architecture, net.lora, where, dtype, head, progress(f"{role}'s adapters")
        )

    if trained is None:
        start = folders.adapters if config.has_adapters else folders.actor
        trained = {"actor": load("actor", start, nets.actor, places.actor, actor_head(config))}
        if nets.critic:
            head, own = (
                "reward" if config.critic.keep_head else "scalar",
                not folders.critic_starts_as_actor,
            )
            trained["critic"] = load(
                "critic", folders.critic if own else start, nets.critic, places.critic, head
            )

        def init(role, where):
            return jax.jit(_optimizer(config, role).init, out_shardings=where)(trained[role])

        where = {"actor": places.actor_optimizer, "critic": places.critic_optimizer}
        trained["optimizer"] = {role: init(role, where[role]) for role in tuple(trained)}
        trained["control"] = sharding.place(
            jax.device_get(first_control(config)), sharding.replicated(mesh)
        )
    reference = reward = None
    if config.keeps_reference:
        name = "base" if config.has_adapters else "reference"
        reference = load_checkpoint(
            folders.actor,
            nets.actor.architecture,
            places.reference,
            frozen_type,
            "lm",
            progress(name),
        )
    if folders.reward:
        reward = load(
            "reward model", folders.reward, nets.reward, places.reward, "reward", frozen_type
        )
    return TrainState(
        sharding.place(np.int32(step), sharding.replicated(mesh)),
        trained["actor"],
        trained.get("critic"),
        reference,
        reward,
        trained["optimizer"]["actor"],
        trained["optimizer"].get("critic"),
        trained["control"],
    )


def _new_adapters(net, places, head, seed, role):
    def init():
        key = jax.random.fold_in(jax.random.key(seed), ADAPTER_STREAMS[role])
        return init_adapters(net.architecture, net.lora, key, head)

    return jax.jit(init, out_shardings=places)()


def first_control(config: schema.Config) -> Control:
    """Control of the first step."""
    kept = {"rewards": config.reward.normalize != "none", "returns": config.critic.normalize_values}
    return Control(
        kl_coefficient(config.algorithm.kl_ctrl, 0),
        {name: moments.start() for name, used in kept.items() if used},
    )


def kl_coefficient(options: schema.KLControl, step):
    """The coefficient that a step begins with where no controller moves it: kl_coef, or as the schedule says."""
    if options.type in ("linear", "step"):
        return schedules.piecewise(
            parsing.parse_schedule(options.schedule), step, linear=options.type == "linear"
        )
    return jnp.float32(options.kl_coef)


def _optimizer(config, role):
    options = getattr(config, role)
    return optimizer(options.optim, options.grad_clip)


def optimizer(options: schema.Optim, grad_clip: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) after clipping by global norm, without the learning rate, which `descend` applies."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.eps),
        optax.add_decayed_weights(options.weight_decay, mask=_matrices),
    )


def _matrices(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding", "lora_a", "lora_b"), params
    )


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
    return jnp.where(
        step < warm, rising, schedules[options.lr_schedule](jnp.maximum(step - warm, 0))
    )


def descend(
    transform: optax.GradientTransformation, params, opt_state, gradients, rate, learns=True
):
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
