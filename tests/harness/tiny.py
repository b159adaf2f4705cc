"""A tiny random actor, critic and rollout for the tests of forward passes and update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config import loading, parsing, schema
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.lora import Lora, init_adapters
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes, update
from jax_ppo.ppo.experience import estimate_experience as estimate
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import EarnedRewards
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.run.evaluation import Evaluation
from jax_ppo.runtime import meshes, placement, sharding
from jax_ppo.training import packing
from jax_ppo.training.control import first_control
from jax_ppo.training.decoders import packed_row_length
from jax_ppo.training.networks import Networks
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.state import TrainState
from jax_ppo.types import MiniBatches, Prompts, Rollout

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tied=True,
    max_position_embeddings=64,
    eos_ids=(1,),
    pad_id=0,
)
# Two layers, so that means over layers differ from sums.
MIXTURE = dataclasses.replace(
    ARCHITECTURE,
    family="mixtral",
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    normalized_expert_weights=True,
)
# A layer without experts, and one of DeepSeek-V3's, whose tokens select a group of two experts.
LATENT = dataclasses.replace(
    MIXTURE,
    family="deepseek_v3",
    block="latent",
    num_kv_heads=4,
    head_dim=12,
    latent_size=8,
    query_latent_size=8,
    rope_head_dim=4,
    value_head_dim=6,
    attention_multiplier=12**-0.5,
    shared_expert_size=8,
    shared_expert_gate=False,
    dense_layers=(True, False),
    dense_size=24,
    sigmoid_router=True,
    router_groups=2,
    groups_per_token=1,
    routed_scale=2.5,
)
# Everything that the second type of block can have; no family has all of it.
UNGATED = dataclasses.replace(
    ARCHITECTURE,
    family="gpt_neox",
    block="ungated",
    num_kv_heads=4,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    activation="gelu",
    parallel_residual=True,
    partial_rotary_factor=0.5,
    learned_positions=True,
)
P, T, B = 8, 10, 8


@functools.cache  # to build one takes as long as a small program takes to compile
def config(command="train", **changes):
    """A small configuration; changes are dotted names with __ for the dot: actor__ppo_epochs=2."""
    values = loading.default_config()
    values.data.train_files = "arithmetic:8"
    values.data.train_batch_size = values.actor.ppo_mini_batch_size = values.data.val_batch_size = B
    values.data.max_prompt_length, values.data.max_response_length = P, T
    values.model.dtype = "float32"
    values.model.gradient_checkpointing = False  # compiles faster
    values.rollout.reuse_logprobs = (
        "never"  # make_rollout's tokens come from nowhere, and their log-probs are 0
    )
    values.actor.optim.lr = values.critic.optim.lr = 1e-2
    for name, value in changes.items():
        values.update_from_flattened_dict({name.replace("__", "."): value})
    return loading.from_config_dict(values, command)


def make_mesh(devices=1, **shape):
    return meshes.make_mesh(schema.MeshShape(**shape), jax.devices()[:devices])


def networks(config):
    model = Transformer(
        ARCHITECTURE, jnp.dtype(config.model.dtype), remat=config.model.gradient_checkpointing
    )
    if config.has_adapters:
        options = config.model.lora
        model = model.clone(
            lora=Lora(options.rank, options.alpha, parsing.parse_lora_targets(options.targets))
        )
    has_critic = config.has_critic and not config.shares_trunk
    return Networks(actor=model, critic=model) if has_critic else Networks(actor=model)


@functools.partial(jax.jit, static_argnames=("model", "head"))
def init_params(model, key, head):
    """Call `heads.init_params` as one program: its operations are one each otherwise."""
    return heads.init_params(model, key, head)


@functools.cache
def random_params(architecture, seed, stream, head):
    """Return random parameters on the host, compiled once for all tests of a process.

    They are scaled up so that distributions are far from uniform.
    """
    model = Transformer(architecture)
    params = init_params(model, jax.random.fold_in(jax.random.key(seed), stream), head)
    return jax.tree.map(lambda x: np.asarray(x) * (5 if x.ndim > 1 else 1), params)


def with_models(state, **models):
    """Return the state with other parameters of some roles."""
    return dataclasses.replace(state, models={**state.models, **models})


def make_state(config, mesh, seed=0):
    """Return a state with random parameters, new adapters, and a critic's head that is not zero."""
    nets = networks(config)
    r = np.random.default_rng(seed)

    def score_head():
        return {"kernel": r.normal(size=(ARCHITECTURE.hidden_size, 1)).astype(np.float32)}

    def new_adapters(net, head):
        return init_adapters(ARCHITECTURE, net.lora, jax.random.key(seed), head)

    head = "both" if config.shares_trunk else "lm"
    actor = dict(random_params(ARCHITECTURE, seed, 0, "lm"))
    reference = jax.tree.map(np.array, actor)
    if config.has_adapters:
        reference = jax.tree.map(lambda x: x.astype(config.model.dtype), reference)
        actor = new_adapters(nets.actor, head)
    if head == "both":
        actor["score"] = score_head()
    models, optimizers = {}, {}
    if nets.critic:
        critic = dict(random_params(ARCHITECTURE, seed, 1, "scalar"))
        if config.has_adapters:
            critic = new_adapters(nets.critic, "scalar")
        critic["score"] = score_head()
        critic = jax.tree.map(lambda x: x.astype(config.critic.optim.param_dtype), critic)
        optimizer = make_optimizer(config.critic)
        models["critic"], optimizers["critic"] = critic, optimizer.init(critic)
    actor = jax.tree.map(lambda x: x.astype(config.actor.optim.param_dtype), actor)
    optimizer = make_optimizer(config.actor)
    state = TrainState(
        step=np.int32(0),
        models=models | {"actor": actor, "reference": reference},
        optimizers=optimizers | {"actor": optimizer.init(actor)},
        control=first_control(config.algorithm.kl_ctrl, config.reward, config.critic),
    )
    everywhere = ((r"step|control/.*", sharding.replicated(mesh).spec),)
    where = sharding.tree_shardings(mesh, state, sharding.TRAIN_RULES + everywhere)
    # Copies: an update donates the arrays, and on the CPU the device could share the host's.
    return jax.device_put(jax.tree.map(np.array, state), where)


def make_rollout(mesh, seed=0, samples=B):
    """Return random tokens of random lengths; one response has one token and one fills T."""
    r = np.random.default_rng(seed)
    prompt_lengths = r.integers(2, P + 1, samples).astype(np.int32)
    lengths = r.integers(1, T + 1, samples).astype(np.int32)
    lengths[0], lengths[1] = 1, T
    responses = r.integers(2, 32, (samples, T)).astype(np.int32) * (np.arange(T) < lengths[:, None])
    prompts = Prompts(r.integers(2, 32, (samples, P)).astype(np.int32), prompt_lengths)
    rollout = Rollout(
        prompts=prompts,
        responses=responses,
        lengths=lengths,
        logprobs=np.zeros((samples, T), np.float32),
        truncated=lengths == T,
        action_mask=np.arange(T) < lengths[:, None],
    )
    return placement.place(rollout, sharding.rows(mesh))


def random_routing(mesh, seed=0, samples=B):
    """Return experts of each token of `make_rollout` by chance, on the mesh."""
    a = ARCHITECTURE
    r = np.random.default_rng(seed)
    shape = (samples, P + T, a.num_layers, a.num_experts)
    experts = r.permuted(np.broadcast_to(np.arange(a.num_experts, dtype=np.uint8), shape), axis=-1)
    return placement.place(experts[..., : a.experts_per_token], sharding.rows(mesh))


def pack_batches(config, mesh, rollout, groups, rows):
    """The groups' MiniBatches, packed on the mesh."""
    total = np.asarray(rollout.prompts.lengths) + np.asarray(rollout.lengths)
    packed, counts = packing.pack_samples(
        total,
        groups,
        rows,
        packed_row_length(config),
        config.packing.enabled,
    )
    parts = meshes.row_parts(mesh)
    packed = packing.split_columns(packed, meshes.row_shards(mesh) // parts, parts)
    members = np.zeros((len(groups), len(total)), bool)
    np.put_along_axis(members, np.asarray(groups), True, 1)
    return MiniBatches(placement.place(packed, sharding.rows(mesh, 2)), counts, members)


def pack_batch(config, mesh, rollout, rows):
    """Return the mini-batch of all samples, packed on the mesh, without a leading axis."""
    batches = pack_batches(config, mesh, rollout, [np.arange(len(rollout.lengths))], rows)
    return jax.tree.map(lambda x: x[0], batches)


def score_rollout(config, mesh, state, rollout, rows=2, nets=None, changes=()):
    """Return the sequences of a rollout and what forward passes over them compute."""
    batch = pack_batch(config, mesh, rollout, rows)
    sequences = forward_passes.join_sequences(rollout, config.sequence_length)
    options = forward_passes.ForwardOptions.from_config(config)
    options = dataclasses.replace(options, **dict(changes))
    arguments = nets or networks(config), state, sequences, (batch.packing, batch.counts)
    return sequences, forward_passes.run_forward_passes(options, *arguments)


def make_experience(config, mesh, state, rollout, rewards=None, rows=2, step_rewards=None):
    """Runs forward passes and estimates advantages. `rows`: R of a micro-batch."""
    sequences, outputs = score_rollout(config, mesh, state, rollout, rows)
    if rewards is None:
        rewards = np.linspace(-1, 1, len(rollout.lengths)).astype(np.float32)
    rewards = placement.place(rewards, sharding.rows(mesh))
    return estimate_experience(
        config, state.control, sequences, rollout.logprobs, outputs, rewards, step_rewards
    )


def make_evaluation(mean, records=(), **figures):
    """Return figures of an evaluation with this accuracy, and this mean reward or 0."""
    fields = {"accuracy": mean, "reward_mean": mean or 0.0, "length_mean": 4.0, "figures": {}}
    return Evaluation(**fields, records=list(records), responses_per_prompt=1, **figures)


# The functions of one step, called with a whole config.


def estimate_experience(config, control, sequences, logprobs, outputs, *rewards):
    """Call `experience.estimate_experience` with the config's options."""
    options = StepOptions(config).experience
    return estimate(options, control, sequences, logprobs, outputs, EarnedRewards(*rewards))


def update_state(config, state, experience, actor, critic, total_steps=100, nets=None):
    """Call `update.update_state` with the config's options and the mini-batches of both roles."""
    nets = nets or networks(config)
    setup = update.UpdateSetup(UpdateOptions.from_config(config), nets, total_steps)
    return update.update_state(setup, state, experience, by_role(actor, critic))


def by_role(actor, critic):
    """Return the mini-batches of the roles; `None` for the critic's without a separate one."""
    return {"actor": actor} | ({} if critic is None else {"critic": critic})


def update_programs(config, state, experience, actor, critic, total_steps=100):
    """Return the update of each role and its arguments, with the config's options."""
    functions = {"actor": update.update_actor, "critic": update.update_critic}
    setup = update.UpdateSetup(UpdateOptions.from_config(config), networks(config), total_steps)
    of_roles = update.update_arguments(setup, state, experience, by_role(actor, critic))
    return [(functions[role], role_arguments) for role, role_arguments in of_roles.items()]


def actor_learner(config, nets, experience, reference=None, teacher=None):
    """Return the learner of the actor, or of actor and critic on a shared trunk."""
    options = UpdateOptions.from_config(config)
    net = nets.actor
    return update.actor_learner(options, net, experience, reference, (net, reference), teacher)


def critic_learner(config, nets, experience, reference=None):
    """Return the learner of the critic."""
    options = UpdateOptions.from_config(config)
    return update.critic_learner(options, nets.critic, experience, reference)


@functools.partial(jax.jit, static_argnames=("options", "net"))
def _actor_gradients(options, net, params, reference, experience, batch):
    learner = update.actor_learner(options, net, experience, reference, (net, reference))
    return learner.gradients(params, batch)


@functools.partial(jax.jit, static_argnames=("options", "net"))
def _critic_gradients(options, net, params, reference, experience, batch):
    return update.critic_learner(options, net, experience, reference).gradients(params, batch)


def actor_gradients(config, *arguments):
    """Return gradients and metrics of the actor, or of both roles on a shared trunk.

    Calls with equal options and shapes share a compiled program.
    """
    options = UpdateOptions.from_config(config)
    return _actor_gradients(options, networks(config).actor, *arguments)


def critic_gradients(config, *arguments):
    """Return gradients and metrics of the critic."""
    options = UpdateOptions.from_config(config)
    return _critic_gradients(options, networks(config).critic, *arguments)


def hidden_state_gradients(model, params):
    """Return the gradients of a function of the hidden states."""
    ids = np.arange(20, dtype=np.int32).reshape(2, 10)
    positions = np.broadcast_to(np.arange(10), ids.shape)

    def loss(params):
        return jnp.sin(model.apply({"params": params}, ids, positions).hidden).sum()

    return jax.jit(jax.grad(loss))(params)
