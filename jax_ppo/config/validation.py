"""Options beside each other: sizes that do not fit, what needs something else, and what may not be meant."""

import dataclasses
import functools

from jax_ppo.config import parsing
from jax_ppo.config.schema import POLICY_LOSSES, Config, Lora, options
from jax_ppo.errors import UserError, did_you_mean

PER_EXAMPLE = {"sft": 1, "reward_model": 2}  # responses of an example, each with the prompt


def validate_train_config(config: Config) -> None:
    """Of jax_ppo.train. Raises UserError for the first thing that is wrong."""
    batch = config.data.train_batch_size
    for role, mini in (
        ("actor", config.actor.ppo_mini_batch_size),
        ("critic", config.critic.ppo_mini_batch_size),
    ):
        if mini and batch % mini:
            raise UserError(
                f"config.{role}.ppo_mini_batch_size={mini}: must divide config.data.train_batch_size={batch}; "
                f"the nearest that does is {_nearest_divisor(batch, mini)}"
            )
    if not config.data.train_files:
        raise UserError(
            "config.data.train_files='': must be set (" + _doc("data.train_files") + ")"
        )
    if config.row_length < config.sequence_length:
        raise UserError(
            f"config.packing.row_length={config.row_length}: a row must hold config.data.max_prompt_length + "
            f"config.data.max_response_length = {config.sequence_length} tokens; set it to that or more"
        )
    for name, sampling in (
        ("rollout", config.rollout),
        ("rollout.val_kwargs", config.rollout.val_kwargs),
    ):
        if sampling.top_k == 0:
            raise UserError(f"config.{name}.top_k=0: expected -1 (all tokens) or at least 1")
    dual = config.actor.clip_ratio_c
    if dual and dual <= 1:
        raise UserError(
            f"config.actor.clip_ratio_c={dual}: the dual clip's constant must be above 1; 0 turns it off"
        )
    for name, used in (
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
        ("actor.use_kl_loss", config.actor.use_kl_loss),
    ):
        if used and not config.algorithm.use_reference:
            raise UserError(
                f"config.{name}=True: needs the reference; set config.algorithm.use_reference=True"
            )
    _check_algorithm(config)
    _check_adapters(config)
    if config.rollout.one_step_off and config.algorithm.rollout_is == "none":
        raise UserError(
            "config.rollout.one_step_off=True: the weights that sample are a step older than those that learn; "
            "set config.algorithm.rollout_is to 'token' or 'sequence'"
        )
    if config.rollout.reuse_logprobs == "always" and config.algorithm.rollout_is != "none":
        raise UserError(
            "config.rollout.reuse_logprobs='always': leaves config.algorithm.rollout_is="
            f"{config.algorithm.rollout_is!r} nothing to weigh against the sampler's log-probs; set it to 'auto'"
        )
    _check_control(config)
    _check_machine(config)
    validate_batch_sharding(config, max(config.mesh.data, 1) * max(config.mesh.fsdp, 1))
    if not config.model.path and not config.data.train_files.startswith("arithmetic:"):
        raise UserError(
            "config.model.path='': must be set to a Hugging Face folder or hub name; only the `arithmetic` data "
            "makes a model of its own"
        )
    create = config.model.create
    if create.hidden_size % create.num_heads or create.num_heads % create.num_kv_heads:
        raise UserError(
            f"config.model.create: num_heads={create.num_heads} must divide hidden_size={create.hidden_size}, "
            f"and num_kv_heads={create.num_kv_heads} must divide num_heads"
        )


def validate_supervised_config(config: Config, command: str) -> None:
    """Of the commands that learn from given responses, as `check`."""
    for name in ("data.train_files", "model.path"):
        if not option_value(config, name):
            raise UserError(f"config.{name}='': must be set ({_doc(name)})")
    longest = config.sequence_length * PER_EXAMPLE[command]
    if config.packing.row_length and config.packing.row_length < longest:
        raise UserError(
            f"config.packing.row_length={config.packing.row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {PER_EXAMPLE[command]} x (config.data.max_prompt_length + config.data."
            "max_response_length); set it to that or more"
        )
    if command == "sft" and config.supervised.center_coef:
        raise UserError(
            f"config.supervised.center_coef={config.supervised.center_coef}: jax_ppo.reward_model alone reads it"
        )
    for name in ("rank", "path"):
        if value := getattr(config.model.lora, name):
            raise UserError(
                f"config.model.lora.{name}={value!r}: jax_ppo.{command} trains all parameters, jax_ppo.train "
                "alone learns adapters; leave it unset"
            )
    _check_machine(config)


def _check_machine(config: Config):
    """The devices, the processes, and where curves go."""
    if config.mesh.data == -1 and config.mesh.fsdp == -1:
        raise UserError(
            "config.mesh.fsdp=-1: only one of config.mesh.data and config.mesh.fsdp can be -1"
        )
    for axis in ("data", "fsdp"):
        if getattr(config.mesh, axis) == 0:
            raise UserError(f"config.mesh.{axis}=0: expected -1 or at least 1")
    explicit = config.distributed
    if explicit.coordinator_address and not 0 <= explicit.process_id < explicit.num_processes:
        raise UserError(
            f"config.distributed.process_id={explicit.process_id}: expected 0 to num_processes - 1 = "
            f"{explicit.num_processes - 1} with config.distributed.coordinator_address set"
        )
    for logger in filter(None, config.trainer.logger.split(",")):
        if logger not in ("tensorboard", "wandb"):
            raise UserError(
                f"config.trainer.logger={config.trainer.logger!r}: expected tensorboard, wandb, or both"
            )


def _check_algorithm(config: Config):
    """What is estimated, and the losses and rewards that it is estimated from."""
    options, reward = config.algorithm, config.reward
    loss = config.actor.policy_loss
    if loss not in POLICY_LOSSES and ":" not in loss:
        raise UserError(
            f"config.actor.policy_loss={loss!r}: expected one of {', '.join(map(repr, POLICY_LOSSES))} or "
            f"module:function.{did_you_mean(loss, POLICY_LOSSES)}"
        )
    if config.actor.entropy_schedule:
        _check_schedule("actor.entropy_schedule", config.actor.entropy_schedule)
    grouped = options.adv_estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline")
    if grouped and config.rollout.n < 2:
        raise UserError(
            f"config.rollout.n={config.rollout.n}: config.algorithm.adv_estimator={options.adv_estimator!r} "
            "compares responses to one prompt; set it to 2 or more"
        )
    of_critic = {
        "trainer.critic_warmup": config.trainer.critic_warmup,
        "critic.path": config.critic.path,
        "critic.keep_head": config.critic.keep_head,
        "critic.shared_trunk": config.critic.shared_trunk,
        "critic.normalize_values": config.critic.normalize_values,
        "algorithm.bootstrap_truncated": options.bootstrap_truncated,
    }
    for name, value in of_critic.items():
        if value and not config.has_critic:
            raise UserError(
                f"config.{name}={value!r}: there is no critic with config.algorithm.adv_estimator="
                f"{options.adv_estimator!r}"
            )
    if reward.process_rewards and not reward.function:
        raise UserError(
            "config.reward.process_rewards=True: needs a config.reward.function that returns step_rewards"
        )
    of_model = {
        "model_input": reward.model_input != "auto",
        "max_length": reward.max_length,
        "micro_batch_size_per_device": reward.micro_batch_size_per_device,
    }
    for name, given in of_model.items():
        if given and not reward.model_path:
            raise UserError(
                f"config.reward.{name}={getattr(reward, name)!r}: there is no reward model; set "
                "config.reward.model_path"
            )
    if reward.overlong_buffer_len > config.data.max_response_length:
        raise UserError(
            f"config.reward.overlong_buffer_len={reward.overlong_buffer_len}: expected at most "
            f"config.data.max_response_length={config.data.max_response_length}"
        )


def _check_adapters(config: Config):
    """Adapters, and where the critic starts."""
    options, default, critic = config.model.lora, Lora(), config.critic
    try:
        parsing.parse_lora_targets(options.targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={options.targets!r}: {error}") from None
    if options.path and options != dataclasses.replace(default, path=options.path):
        raise UserError(
            f"config.model.lora.path={options.path!r}: says what rank, alpha and targets are; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )
    of_its_own = {
        name: option_value(config, name)
        for name in (
            "trainer.critic_warmup",
            "critic.path",
            "critic.keep_head",
            "critic.ppo_epochs",
            "critic.ppo_mini_batch_size",
            "critic.ppo_micro_batch_size_per_device",
            "critic.loss_agg_mode",
        )
    }
    for name, value in of_its_own.items():
        if value and critic.shared_trunk:
            raise UserError(
                f"config.{name}={value!r}: a critic that shares the actor's trunk has none of its own; leave it "
                "unset, or set config.critic.shared_trunk=False"
            )
    if critic.keep_head and not critic.path:
        raise UserError("config.critic.keep_head=True: needs a config.critic.path that has a head")


def option_value(config: Config, name: str):
    return functools.reduce(getattr, name.split("."), config)


def _check_control(config: Config):
    """The coefficient of the KL to the reference."""
    options, control = config.algorithm, config.algorithm.kl_ctrl
    if config.actor.kl_loss_ctrl and not config.actor.use_kl_loss:
        raise UserError(
            "config.actor.kl_loss_ctrl=True: weighs the KL in the loss; set config.actor.use_kl_loss=True"
        )
    if control.type in ("linear", "step"):
        _check_schedule("algorithm.kl_ctrl.schedule", control.schedule)
    elif control.schedule:
        raise UserError(
            f"config.algorithm.kl_ctrl.schedule={control.schedule!r}: is not read with config.algorithm.kl_ctrl."
            f"type={control.type!r}; set that to 'linear' or 'step'"
        )
    if control.type != "fixed" and not (options.use_kl_in_reward or config.actor.kl_loss_ctrl):
        raise UserError(
            f"config.algorithm.kl_ctrl.type={control.type!r}: moves the coefficient of the KL in the reward or "
            "the loss; set config.algorithm.use_kl_in_reward=True or config.actor.kl_loss_ctrl=True"
        )
    samples = config.data.train_batch_size * config.rollout.n
    if control.type == "adaptive" and control.horizon < samples:
        raise UserError(
            f"config.algorithm.kl_ctrl.horizon={control.horizon}: must be at least the {samples} samples of "
            "a step, or one step could take the coefficient far past its target"
        )


def _check_schedule(name: str, text: str):
    try:
        parsing.parse_schedule(text)
    except ValueError as error:
        raise UserError(f"config.{name}={text!r}: {error}") from None


def validate_batch_sharding(config: Config, shards: int):
    """The rows of a batch are dealt evenly to the devices of the data and fsdp axes. Raises UserError."""
    for name, prompts in (
        ("data.train_batch_size", config.data.train_batch_size),
        ("data.val_batch_size", config.data.val_batch_size),
    ):
        if prompts % shards:
            raise UserError(
                f"config.{name}={prompts}: must be a multiple of the {shards} devices along config.mesh.data x "
                f"config.mesh.fsdp; the nearest is {max(shards, round(prompts / shards) * shards)}"
            )


def _nearest_divisor(number, wanted):
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _doc(name):
    return next(doc for known, _, _, doc in options() if known == name)
