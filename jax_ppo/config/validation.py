"""Options beside each other: sizes that do not fit, what needs something else, and what may not be meant."""

import dataclasses
import functools

from jax_ppo.config import parsing as notation
from jax_ppo.config.schema import POLICY_LOSSES, Config, CriticOptim, Lora, options
from jax_ppo.errors import UserError, did_you_mean

PER_EXAMPLE = {"sft": 1, "reward_model": 2}  # responses of an example, each with the prompt
PPO_ALONE = (
    "actor.",
    "critic.",
    "algorithm.",
    "rollout.",
    "reward.",
    "model.create.",
    "model.lora.",
    "trainer.critic_warmup",
    "trainer.best_metric",
    "trainer.log_samples",
    "trainer.warn_",
)  # options that no other command reads


def check(config: Config) -> None:
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
    check_batches_divide(config, max(config.mesh.data, 1) * max(config.mesh.fsdp, 1))
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


def check_supervised(config: Config, command: str) -> None:
    """Of the commands that learn from given responses, as `check`."""
    for name in ("data.train_files", "model.path"):
        if not _value(config, name):
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


def supervised_notes(config: Config, command: str) -> list[str]:
    """Options that are set and that the commands which learn from given responses do not read."""
    others = dict.fromkeys(PPO_ALONE, "train") | (
        {"supervised.response_key": "sft"} if command == "reward_model" else {}
    )
    return [
        f"config.{name}={_value(config, name)!r} is not read: it belongs to jax_ppo.{other}"
        for name, _, default, _ in options()
        if _value(config, name) != default
        for start, other in others.items()
        if name.startswith(start)
    ]


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
        notation.lora_targets(options.targets)
    except ValueError as error:
        raise UserError(f"config.model.lora.targets={options.targets!r}: {error}") from None
    if options.path and options != dataclasses.replace(default, path=options.path):
        raise UserError(
            f"config.model.lora.path={options.path!r}: says what rank, alpha and targets are; leave "
            "config.model.lora.rank, alpha and targets at their defaults"
        )
    of_its_own = {
        name: _value(config, name)
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


def notes(config: Config) -> list[str]:
    """What is allowed and may not be meant: options that nothing reads beside others, and biases that are easily missed."""
    algorithm, actor, default = config.algorithm, config.actor, Config()
    found = []
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        found.append(
            "config.rollout.top_k and top_p cut the distribution that is sampled, while log-probs and ratios are of "
            "the whole one: what is learned is off-policy by that much"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_penalty != "k1":
        found.append(
            f"config.algorithm.kl_penalty={algorithm.kl_penalty!r}: in the reward k1 alone follows the KL's gradient; "
            "kernels/kl.py says what the others do"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        found.append(
            "config.actor.kl_loss_type='k1': its expected gradient is 0, so it restrains nothing; k2 does"
        )
    if (
        actor.policy_loss == "gspo"
        and actor.clip_ratio_low is None
        and actor.clip_ratio_high is None
    ):
        found.append(
            f"config.actor.policy_loss='gspo': the ratio of a sequence hardly ever reaches config.actor.clip_ratio="
            f"{actor.clip_ratio}; its authors take clip_ratio_low=3e-4 and clip_ratio_high=4e-4"
        )
    if actor.policy_loss == "reinforce" and not config.updates_once:
        found.append(
            "config.actor.policy_loss='reinforce': is biased once the policy has moved; it is meant for one optimizer "
            "step a rollout"
        )
    if config.model.lora.path and (algorithm.use_kl_in_reward or actor.use_kl_loss):
        found.append(
            f"config.model.lora.path={config.model.lora.path!r}: the reference is the bare base, not the policy that "
            "training starts from; merge those adapters into config.model.path if the KL is to be measured to them"
        )
    unread = (
        {
            "actor.target_kl": config.updates_once,
            "actor.loss_scale_factor": "norm" not in actor.loss_agg_mode,
            "algorithm.norm_adv_by_std_in_grpo": algorithm.adv_estimator != "grpo",
            "algorithm.whiten_shift_mean": not config.whitens_advantages,
            "algorithm.bootstrap_truncated": algorithm.mask_truncated,
            "model.lora.alpha": not config.has_adapters,
            "model.lora.targets": not config.has_adapters,
            "algorithm.gamma": algorithm.adv_estimator
            in ("grpo", "rloo", "reinforce_plus_plus_baseline"),
            "reward.normalize_shift": config.reward.normalize == "none",
            "reward.normalize_samples": config.reward.normalize != "reference",
        }
        | {
            name: not config.has_critic
            for name in (
                "algorithm.lam",
                "algorithm.lam_length_alpha",
                "algorithm.critic_lam",
                "algorithm.critic_gamma",
                "critic.ppo_epochs",
                "critic.ppo_mini_batch_size",
                "critic.huber_delta",
            )
        }
        | {
            f"critic.{name}": config.shares_trunk
            for name in (
                "grad_clip",
                *(f"optim.{field.name}" for field in dataclasses.fields(CriticOptim)),
            )
        }
    )
    for name, unused in unread.items():
        value = _value(config, name)
        if unused and value != _value(default, name):
            found.append(f"config.{name}={value!r} changes nothing beside the other options")
    found += [
        f"config.{name}={_value(config, name)!r} is not read: it belongs to jax_ppo.sft and jax_ppo.reward_model"
        for name, _, default, _ in options()
        if name.startswith("supervised.") and _value(config, name) != default
    ]
    steps = config.trainer.total_training_steps
    if steps and config.trainer.critic_warmup >= steps:
        found.append(
            f"config.trainer.critic_warmup={config.trainer.critic_warmup}: the actor never learns in {steps} steps"
        )
    return found


def _value(config: Config, name: str):
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
        notation.schedule_points(text)
    except ValueError as error:
        raise UserError(f"config.{name}={text!r}: {error}") from None


def check_batches_divide(config: Config, shards: int):
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
