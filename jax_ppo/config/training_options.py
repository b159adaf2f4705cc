"""Options of the models, their losses and optimizers, and of advantages."""

import dataclasses

from jax_ppo.config import option_rules as rule
from jax_ppo.config.option import (
    ADVANTAGES,
    LEARNING,
    MODELS,
    POLICY,
    PPO,
    SUPERVISED,
    OptionRule,
    option,
    redeclare,
    section,
    unread_unless,
)
from jax_ppo.config.parsing import LORA_TARGETS, PARAMETER_GROUPS, parse_lora_targets
from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    IMPORTANCE_WEIGHTS,
    KL_CONTROLLERS,
    KL_ESTIMATORS,
    LEARNING_RATE_SCHEDULES,
    POLICY_LOSSES,
)

STORED_DTYPES = ("float32", "bfloat16")

# fmt: off
# As in schema.py.


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters."""

    rank: int = option(0,
        "rank of the adapters that actor and critic train on one frozen base, which is also the "
        "reference; 0: train all parameters",
        at_least=0, rules=(rule.TRAINS_ADAPTERS,))
    alpha: float = option(16.0, "the adapters' product is scaled by alpha / rank",
        above=0, rules=(rule.HAS_ADAPTERS,))
    targets: str = option("all-linear",
        f"projections with adapters, separated by commas: {', '.join(LORA_TARGETS)}; or all-linear",
        is_list=True, parse=parse_lora_targets, rules=(rule.HAS_ADAPTERS,))
    path: str = option("",
        "folder or hub name of adapters in PEFT's format to start from, with their rank, alpha "
        "and targets",
        rules=(
            rule.TRAINS_ADAPTERS,
            OptionRule(lambda c: c.model.lora == LoraOptions(path=c.model.lora.path),
                "the other options of `model.lora` are unset",
                "determines rank, alpha and targets; leave config.model.lora.rank, alpha and "
                "targets at their defaults")))


@dataclasses.dataclass(frozen=True)
class Model:
    """The pretrained model and its computation."""

    path: str = option("",
        "Hugging Face folder or hub name, OWNER/NAME or OWNER/NAME@REVISION; empty: the package's "
        "small model, which solves problems of `arithmetic`",
        rules=(
            rule.must_be_set(lambda c: c.model.path, "score", *SUPERVISED),
            rule.must_be_set(lambda c: c.model.path or not c.learns_from_files),
            OptionRule(lambda c: c.model.path or c.data.train_files.startswith("arithmetic:"), "",
                "must be set to a Hugging Face folder or hub name; the small model solves only the "
                "problems of `arithmetic`", at_default=True)))
    tokenizer_path: str = option("", "folder or hub name of the tokenizer; empty: model.path")
    dtype: str = option("auto",
        "type of the computation; auto: bfloat16 on TPUs and on GPUs from compute capability 8.0, "
        "else float32. Parameters are stored in optim.param_dtype",
        choices=("auto", "bfloat16", "float32"))
    gradient_checkpointing: bool | None = option(None,
        "recompute each layer's activations in the backward pass, to save memory; auto: only if "
        "the memory of the accelerator requires it, on CPUs always",
        is_automatic=True, fixed_on_resume=False, read_by=LEARNING)
    gradient_checkpointing_policy: str = option("full",
        "activations kept for the backward pass besides a layer's input: full, none; attention, "
        "attention's output; dots, all matrix products (most memory, least time)",
        choices=("full", "attention", "dots"), fixed_on_resume=False, read_by=LEARNING,
        rules=(rule.option_is("model.gradient_checkpointing", True),))
    attention: str = option("auto",
        "attention for whole sequences: xla, everywhere; cudnn, NVIDIA GPUs in bfloat16; splash, "
        "TPUs if packing.row_length is unset or a multiple of 128; auto: the platform's kernel "
        "where it can run",
        choices=("auto", "xla", "cudnn", "splash"))
    lora: LoraOptions = section(LoraOptions, read_by=MODELS)


@dataclasses.dataclass(frozen=True)
class Optim:
    """The optimizer and its learning-rate schedule."""

    lr: float = option(1e-6, "peak learning rate", above=0)
    lr_warmup_steps: int = option(0,
        "steps of linear warm-up, not counting steps that leave this model unchanged",
        unit="steps", at_least=0)
    lr_schedule: str = option("constant", "schedule after the warm-up, until the last step",
        choices=tuple(LEARNING_RATE_SCHEDULES))
    min_lr_ratio: float = option(0.0, "fraction of lr at the end of linear and cosine",
        at_least=0, at_most=1)
    beta1: float = option(0.9, "AdamW's beta1", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW's beta2", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)
    weight_decay: float = option(0.01,
        "decoupled weight decay, of matrices only, not of norms and biases",
        at_least=0)
    param_dtype: str = option("float32",
        "type of stored parameters; steps are computed in float32, and bfloat16 is rounded "
        "stochastically so that small steps count on average",
        choices=STORED_DTYPES, fixed_on_resume=True)
    moments_dtype: str = option("float32",
        "type of the optimizer's stored moments; bfloat16 is rounded stochastically",
        choices=STORED_DTYPES, fixed_on_resume=True)
    gradient_dtype: str = option("float32",
        "type of the sum of gradients over micro-batches; bfloat16 is rounded stochastically",
        choices=STORED_DTYPES)


@dataclasses.dataclass(frozen=True)
class CriticOptim(Optim):
    """AdamW with a higher default learning rate, for models with a new head."""

    # A head that starts at zero has farther to go than a pretrained policy.
    lr: float = option(1e-5, "peak learning rate", above=0)


@dataclasses.dataclass(frozen=True)
class RouterReplay:
    """Replay of the experts that the sampler selected, in the actor's forward pass and update."""

    mode: str = option("disabled",
        "R3: the actor's passes send each token through the experts used in sampling (routing "
        "replay); disabled: each pass selects experts anew",
        choices=("disabled", "R3"),
        rules=(
            rule.engine_is_built_in("does not record it; use the built-in engine"),
            rule.DRAWN_WITHIN_STEP,
            rule.DRAWN_ONCE))


@dataclasses.dataclass(frozen=True)
class Actor:
    """The policy's loss and update."""

    optim: Optim = section(Optim)
    router_replay: RouterReplay = section(RouterReplay)
    grad_clip: float = option(1.0, "maximum global gradient norm", above=0)
    optimizer_offload: bool = option(False,
        "keep the optimizer state in the host's memory between updates")
    param_offload: bool = option(False,
        "keep the actor's parameters in the host's memory when no phase uses them; sampling "
        "uses only its copy for decoding",
        read_by=MODELS)
    ppo_mini_batch_size: int = option(64,
        "prompts per optimizer step, each with rollout.n samples (or rollout.keep); samples are "
        "shuffled individually",
        unit="prompts", at_least=1, read_by=PPO)
    ppo_micro_batch_size_per_device: int | None = option(None,
        "packed rows that a device processes at once; auto: a sixteenth of all rows, or more if "
        "they are short or few, up to 8,192 tokens, and fewer if the memory requires it",
        unit="rows", at_least=1, is_automatic=True, read_by=MODELS)
    ppo_epochs: int = option(1, "passes over a rollout, each in another order", at_least=1,
        read_by=PPO)
    clip_ratio: float = option(0.2, "the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]",
        above=0, below=1,
        rules=(
            rule.LOSS_CLIPS,
            OptionRule(lambda c: None in (c.actor.clip_ratio_low, c.actor.clip_ratio_high),
                "`actor.clip_ratio_low` or `actor.clip_ratio_high` is unset")))
    clip_ratio_low: float | None = option(None, "clip range below 1; unset: clip_ratio",
        above=0, below=1, rules=(rule.LOSS_CLIPS,))
    clip_ratio_high: float | None = option(None, "clip range above 1; unset: clip_ratio",
        above=0, rules=(rule.LOSS_CLIPS,))
    clip_ratio_c: float | None = option(3.0,
        "dual clip: bound of the ratio where the advantage is negative; 0 turns it off",
        at_least=0,
        rules=(
            OptionRule(lambda c: not c.actor.clip_ratio_c or c.actor.clip_ratio_c > 1,
                "it is above 1, or 0",
                "the dual clip's constant must be above 1; 0 turns it off"),
            OptionRule(lambda c: POLICY_LOSSES.lookup(c.actor.policy_loss).clips_twice,
                POLICY_LOSSES.condition(lambda entry: not entry.clips_twice, negated=True))))
    policy_loss: str = option("vanilla",
        "loss of a token, or your own, `module:function` or `file.py:function` "
        "(kernels/policy_losses.py)",
        choices=tuple(POLICY_LOSSES), is_plugin=True)
    entropy_coeff: float = option(0.0, "weight of the entropy bonus", at_least=0)
    router_aux_loss_coef: float = option(0.0,
        "weight of the load-balancing loss of a mixture of experts",
        at_least=0, rules=(rule.SEQUENCES_ARE_WHOLE,))
    use_kl_loss: bool = option(False, "add the KL to the reference to the actor's loss",
        rules=(rule.USES_REFERENCE,))
    kl_loss_coef: float = option(0.001, "weight of the KL in the loss",
        at_least=0, rules=(rule.HAS_KL_LOSS,))
    kl_loss_type: str = option("k3",
        "estimator of the KL in the loss, where k1 does not restrain the policy; or a function of "
        "log-ratios (kernels/kl.py)",
        choices=tuple(KL_ESTIMATORS), is_plugin=True, aliases=KL_ESTIMATORS.other_names(),
        rules=(rule.HAS_KL_LOSS,))
    target_kl: float | None = option(None,
        "skip a step's remaining mini-batches once the approximate KL to the policy at its start "
        "exceeds 1.5 times this; unset: no limit",
        unit="nats per token", above=0,
        rules=(OptionRule(lambda c: not c.updates_once,
            "a step takes several mini-batches or epochs"),))
    loss_agg_mode: str = option("token-mean",
        "how the losses of a mini-batch's tokens are averaged",
        choices=tuple(AGGREGATIONS), read_by=PPO)
    loss_scale_factor: int | None = option(None,
        "divisor of seq-mean-token-sum-norm; unset: data.max_response_length",
        unit="tokens", at_least=1, read_by=PPO,
        rules=(OptionRule(lambda c: any(
            AGGREGATIONS[mode].needs_scale
            for mode in filter(None, (c.actor.loss_agg_mode, c.critic.loss_agg_mode))),
            "`actor.loss_agg_mode` or `critic.loss_agg_mode` is seq-mean-token-sum-norm"),))


@dataclasses.dataclass(frozen=True)
class Reference:
    """The policy that the KL is measured to."""

    path: str = option("",
        "folder or hub name of the reference, with the actor's architecture, or with model.lora "
        "of adapters in PEFT's format; empty: the policy that the run starts from, without "
        "adapters",
        fixed_on_resume=True, rules=(rule.USES_REFERENCE,))


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A policy that the actor learns to imitate, on responses that the actor has sampled."""

    path: str = option("",
        "folder or hub name of the teacher, a policy with the actor's vocabulary (with "
        "model.lora, adapters in PEFT's format); empty: none",
        fixed_on_resume=True)
    reward_coef: float = option(1.0,
        "subtract this times log actor - log teacher of each sampled token from its reward; 0: no "
        "rewards from the teacher",
        at_least=0,
        rules=(
            rule.HAS_TEACHER,
            OptionRule(lambda c: c.teacher.reward_coef or c.teacher.loss_coef,
                "it or `teacher.loss_coef` is more than 0",
                "expected more than 0, or a config.teacher.loss_coef above 0; otherwise nothing "
                "reads config.teacher.path")))
    loss_coef: float = option(0.0,
        "add this times KL(actor || teacher) over the vocabulary to the actor's loss: a pass of "
        "the teacher per micro-batch",
        at_least=0, read_by=POLICY, rules=(rule.HAS_TEACHER,))
    use_task_rewards: bool = option(True,
        "also learn from the rewards of rules and reward model; off: they are only reported",
        rules=(rule.HAS_TEACHER,))
    param_offload: bool = option(False,
        "keep the teacher in the host's memory when it does not compute",
        rules=(rule.HAS_TEACHER,))


@dataclasses.dataclass(frozen=True)
class Critic:
    """The value function's model, loss and update."""

    path: str = option("",
        "folder or hub name of the critic's first weights (with model.lora, adapters in PEFT's "
        "format); empty: model.path",
        fixed_on_resume=True, read_by=ADVANTAGES, rules=(rule.HAS_CRITIC, rule.CRITIC_HAS_TRUNK))
    keep_head: bool | None = option(None,
        "start with the scalar head in critic.path, such as a reward model's; off: with zeros; "
        "unset: on if a run exported critic.path as a critic",
        fixed_on_resume=False, read_by=ADVANTAGES,
        rules=(
            rule.HAS_CRITIC,
            rule.CRITIC_HAS_TRUNK,
            rule.is_set("critic.path", "needs a config.critic.path that has a head"),
            dataclasses.replace(rule.HAS_CRITIC, message="", first_step_only=True)))
    shared_trunk: bool = option(False,
        "make the critic a scalar head on the actor's trunk: one pass serves both losses; the "
        "head uses actor.optim and stops with actor.target_kl",
        fixed_on_resume=True, rules=(rule.HAS_CRITIC,))
    freeze: str = option("none",
        "parameters that stay as they are, without gradients and optimizer state: attention, of "
        "all layers that mix tokens, also DeltaNets and convolutions; embedding",
        choices=("none", *PARAMETER_GROUPS), fixed_on_resume=True,
        rules=(rule.HAS_CRITIC, rule.CRITIC_HAS_TRUNK, rule.TRAINS_WEIGHTS))
    optim: CriticOptim = section(CriticOptim,
        rules=(rule.CRITIC_IS_SEPARATE,))
    grad_clip: float = redeclare(Actor, "grad_clip",
        rules=(rule.CRITIC_IS_SEPARATE,))
    optimizer_offload: bool = option(False, "as the actor's",
        rules=(rule.CRITIC_IS_SEPARATE,))
    param_offload: bool = option(False,
        "keep the critic's parameters in the host's memory when it does not compute",
        read_by=ADVANTAGES, rules=(rule.CRITIC_IS_SEPARATE,))
    ppo_mini_batch_size: int | None = option(None, "as the actor's; unset: the actor's",
        unit="prompts", at_least=1, rules=(rule.CRITIC_HAS_TRUNK, unread_unless(rule.HAS_CRITIC)))
    ppo_micro_batch_size_per_device: int | None = option(None, "as the actor's; auto: the actor's",
        unit="rows", at_least=1, is_automatic=True, rules=(rule.CRITIC_HAS_TRUNK,))
    ppo_epochs: int | None = option(None, "as the actor's; unset: the actor's",
        at_least=1, rules=(rule.CRITIC_HAS_TRUNK, unread_unless(rule.HAS_CRITIC)))
    loss_agg_mode: str | None = option(None, "as the actor's; unset: the actor's",
        choices=tuple(AGGREGATIONS), rules=(rule.CRITIC_HAS_TRUNK,))
    cliprange_value: float | None = option(0.5,
        "how far a new value may move from the old one in the loss; 0: no limit",
        at_least=0, rules=(unread_unless(rule.HAS_CRITIC),))
    value_loss_coef: float = option(1.0,
        "weight of the value loss; also scales the reported loss and gradient norm",
        above=0, rules=(unread_unless(rule.HAS_CRITIC),))
    router_aux_loss_coef: float = option(0.0, "as the actor's",
        at_least=0, rules=(rule.CRITIC_IS_SEPARATE, rule.SEQUENCES_ARE_WHOLE))
    normalize_values: bool = option(False,
        "train the critic on returns normalized by their running mean and deviation; "
        "cliprange_value then counts in standard deviations",
        fixed_on_resume=True, read_by=ADVANTAGES, rules=(rule.HAS_CRITIC,))


@dataclasses.dataclass(frozen=True)
class KLControl:
    """The coefficient of the KL to the reference."""

    type: str = option("fixed",
        "how the coefficient changes: fixed, not at all; adaptive, towards target_kl",
        choices=tuple(KL_CONTROLLERS),
        rules=(
            rule.option_is("algorithm.use_kl_in_reward", True,
                "changes the coefficient of the KL in the reward; set "
                "config.algorithm.use_kl_in_reward=True"),
            rule.is_set("algorithm.kl_ctrl.kl_coef",
                "multiplies config.algorithm.kl_ctrl.kl_coef=0, which stays 0; set it above 0")))
    kl_coef: float = option(0.001,
        "coefficient of the KL in the reward; with adaptive, its initial value",
        at_least=0,
        rules=(
            rule.option_is("algorithm.use_kl_in_reward", True),
            dataclasses.replace(rule.KL_ADAPTS, first_step_only=True)))
    target_kl: float = option(0.1, "KL that adaptive aims at, per target_unit",
        unit="nats", above=0, rules=(rule.KL_ADAPTS,))
    target_unit: str = option("token",
        "unit of target_kl: token, the mean KL per token (verl); sequence, its sum over a "
        "response (OpenAI's 6)",
        choices=("token", "sequence"), rules=(rule.KL_ADAPTS,))
    horizon: int = option(10_000, "samples over which adaptive changes the coefficient",
        unit="samples", at_least=1,
        rules=(
            # The coefficient stays positive while 0.2 x samples < horizon (kernels/kl.py).
            OptionRule(lambda c: c.algorithm.kl_ctrl.type != "adaptive" or (
                c.algorithm.kl_ctrl.horizon >= c.samples_per_step),
                "it is at least a step's samples, for `adaptive`",
                "must be at least the {c.samples_per_step} samples of a step, or one step could "
                "take the coefficient far past its target", at_default=True),
            rule.KL_ADAPTS))


@dataclasses.dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO): prompts whose responses earn equal rewards are replaced."""

    enable: bool = option(False,
        "replace prompts whose responses all earned the same reward by further prompts",
        rules=(rule.REWARDS_BY_RULE, rule.NEWEST_WEIGHTS, rule.DRAWN_ONCE))
    metric: str = option("score",
        "figure that must differ within a prompt: score, the reward of the rules; accuracy, "
        "correct or not",
        choices=("score", "accuracy"),
        aliases={"acc": "accuracy", "seq_reward": "score", "seq_final_reward": "score"},
        rules=(rule.FILTERS_GROUPS,))
    max_num_gen_batches: int = option(10,
        "maximum batches of train_batch_size prompts that a step samples; prompts with equal "
        "rewards then fill the rest",
        unit="batches", at_least=1, rules=(rule.FILTERS_GROUPS,))


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Advantages, returns and the KL to the reference."""

    adv_estimator: str = option("gae",
        "estimator of advantages, or your own, `module:function` or `file.py:function` "
        "(ppo/advantages.py)",
        choices=tuple(ADVANTAGE_ESTIMATORS), is_plugin=True, fixed_on_resume=True)
    gamma: float = option(1.0, "discount per token",
        at_least=0, at_most=1, rules=(rule.estimator_reads("gamma"),))
    lam: float = option(1.0, "GAE's lambda, per token",
        at_least=0, at_most=1, rules=(rule.estimator_reads("lam"),))
    turn_gamma: float = option(1.0, "discount per turn of a dialogue",
        at_least=0, at_most=1, rules=(rule.estimator_reads("turn_gamma"),))
    turn_lam: float = option(1.0, "GAE's lambda, per turn of a dialogue",
        at_least=0, at_most=1, rules=(rule.estimator_reads("turn_lam"),))
    critic_lam: float | None = option(None,
        "lambda of the critic's returns, per token and per turn; unset: lam and turn_lam",
        at_least=0, at_most=1, rules=(unread_unless(rule.HAS_CRITIC),))
    lam_length_alpha: float | None = option(None,
        "lambda of advantages is 1 - 1 / (this x response length), 0.05 in VAPO; unset: lam",
        above=0, rules=(rule.estimator_reads("lam"),))
    bootstrap_truncated: bool = option(False,
        "a response that was cut off ends with the critic's value, not with 0",
        rules=(
            rule.HAS_CRITIC,
            rule.VALUES_TOKENS,
            rule.option_is("algorithm.mask_truncated", False)))
    mask_truncated: bool = option(False,
        "exclude responses that were cut off from the losses, but not from baselines, whitened "
        "rewards and running moments")
    norm_adv_by_std_in_grpo: bool = option(True,
        "divide GRPO's advantages by the standard deviation of a prompt's rewards; off: Dr. GRPO",
        rules=(rule.estimator_reads("norm_adv_by_std_in_grpo"),))
    whiten_rewards: bool = option(False,
        "scale token rewards to variance 1 over the rollout, keeping their mean")
    whiten_advantages: bool | None = option(None,
        "scale advantages to variance 1 over the whole rollout; unset: with "
        f"{', '.join(ADVANTAGE_ESTIMATORS.names(lambda entry: entry.whitens))}")
    use_kl_in_reward: bool = option(False,
        "subtract the KL to the reference, times kl_ctrl's coefficient, from each token's reward",
        rules=(rule.USES_REFERENCE,))
    use_reference: bool = option(True,
        "measure the KL to a frozen reference: reference.path, or the first policy, without "
        "adapters")
    reference_offload: bool = option(False,
        "keep the reference in the host's memory when it does not compute",
        rules=(OptionRule(lambda c: c.algorithm.use_reference and not c.has_adapters,
            "`algorithm.use_reference` is on, without adapters",
            "there is no separate reference: config.algorithm.use_reference is off, or it is "
            "the base of adapters (config.model.lora)"),))
    kl_penalty: str = option("k1",
        "estimator of the KL in the reward, where only k1 follows the KL's gradient; or a "
        "function as for actor.kl_loss_type",
        choices=KL_ESTIMATORS.names(lambda entry: not entry.only_in_loss), is_plugin=True,
        aliases=KL_ESTIMATORS.other_names(), rules=(unread_unless(rule.USES_REFERENCE),))
    kl_ctrl: KLControl = section(KLControl)
    filter_groups: FilterGroups = section(FilterGroups, read_by=PPO)
    rollout_is: str = option("none",
        "importance weights of the policy loss, for samples of older weights "
        "(rollout.max_staleness) or the sampler's rounding",
        choices=tuple(IMPORTANCE_WEIGHTS), read_by=POLICY, rules=(rule.DRAWN_ONCE,))
    rollout_is_threshold: float = option(2.0, "upper bound of importance weights",
        at_least=1, read_by=POLICY, rules=(rule.HAS_IMPORTANCE_WEIGHTS,))
    rollout_is_lower: float = option(0.0, "lower bound of importance weights",
        at_least=0, below=1, read_by=POLICY, rules=(rule.HAS_IMPORTANCE_WEIGHTS,))
    rollout_is_masks: bool = option(False,
        "weights outside the bounds become 0, as in IcePop; off: they are truncated to the bounds",
        read_by=POLICY, rules=(rule.HAS_IMPORTANCE_WEIGHTS,))
