"""Define every option with its default, unit, range and meaning, and the commands that read it.

Names are verl's where the concept is the same: batch and mini-batch sizes count prompts,
frequencies count steps. `docs/options.md` is generated from this file by
`python -m jax_ppo.config --markdown`.
"""

import dataclasses
import functools

from jax_ppo.config.option import Condition, Option, Requirement, iterate_options, option, section

# verl's names of the KL estimators, accepted in addition to those of Schulman's note.
VERL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POLICY_LOSSES = ("vanilla", "importance", "gspo", "gmpo", "cispo", "reinforce")
STORED_DTYPES = ("float32", "bfloat16")
LOGGERS = ("console", "tensorboard", "wandb", "mlflow")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

PPO = ("train",)
SUPERVISED = ("sft", "reward_model")

# Conditions that options depend on. Changing an option is an error if a requirement is not met, and
# causes a note that it has no effect if a condition is not met.
HAS_CRITIC = Requirement(
    lambda config: config.has_critic,
    "`algorithm.adv_estimator` is gae",
    "there is no critic with config.algorithm.adv_estimator={config.algorithm.adv_estimator!r}",
)
CRITIC_HAS_TRUNK = Requirement(
    lambda config: not config.critic.shared_trunk,
    "`critic.shared_trunk` is off",
    "a critic that shares the actor's trunk has no trunk of its own; leave it unset, or set "
    "config.critic.shared_trunk=False",
)
CRITIC_HAS_PATH = Requirement(
    lambda config: bool(config.critic.path),
    "`critic.path` is set",
    "needs a config.critic.path that has a head",
)
HAS_LOCAL_DIR = Condition(
    lambda config: bool(config.trainer.local_dir), "`trainer.local_dir` is set"
)
SAMPLES_WITHIN_STEP = Requirement(
    lambda config: not config.rollout.one_step_off,
    "`rollout.one_step_off` is off",
    "the states in it do not include the batch that config.rollout.one_step_off=True samples ahead",
)
HAS_ROLLOUT_MESH = Requirement(
    lambda config: config.rollout.mesh.model is not None,
    "`rollout.mesh.model` is set",
    "decoding uses config.mesh; set config.rollout.mesh.model",
)
USES_REFERENCE = Requirement(
    lambda config: config.algorithm.use_reference,
    "`algorithm.use_reference` is on",
    "needs the reference; set config.algorithm.use_reference=True",
)
USES_KL_COEFFICIENT = Requirement(
    lambda config: config.algorithm.use_kl_in_reward,
    "`algorithm.use_kl_in_reward` is on",
    "changes the coefficient of the KL in the reward; set config.algorithm.use_kl_in_reward=True",
)
HAS_BUILT_IN_ENGINE = Requirement(
    lambda config: config.rollout.engine == "built-in",
    "`rollout.engine` is built-in",
    "config.rollout.engine={config.rollout.engine!r} stores its weights itself",
)
KL_COEFFICIENT_ADAPTS = Condition(
    lambda config: config.algorithm.kl_ctrl.type == "adaptive",
    "`algorithm.kl_ctrl.type` is adaptive",
)
HAS_IMPORTANCE_WEIGHTS = Requirement(
    lambda config: config.algorithm.rollout_is != "none",
    "`algorithm.rollout_is` is token or sequence",
    "the sampling weights are one step older than the weights that are trained; set "
    "config.algorithm.rollout_is to 'token' or 'sequence'",
)
HAS_REWARD_FUNCTION = Requirement(
    lambda config: bool(config.reward.function or config.reward.terms),
    "`reward.function` or `reward.terms` is set",
    "needs a config.reward.function that returns step_rewards",
)
HAS_REWARD_URL = Requirement(
    lambda config: bool(config.reward.url),
    "`reward.url` is set",
    "needs a server; set config.reward.url",
)
HAS_REWARD_MODEL = Requirement(
    lambda config: bool(config.reward.model_path),
    "`reward.model_path` is set",
    "there is no reward model; set config.reward.model_path",
)
REFERENCE_IS_SEPARATE = Requirement(
    lambda config: config.algorithm.use_reference and not config.has_adapters,
    "`algorithm.use_reference` is on, without adapters",
    "there is no separate reference: config.algorithm.use_reference is off, or it is the "
    "base of adapters (config.model.lora)",
)
HAS_ADAPTERS = Condition(
    lambda config: config.has_adapters, "`model.lora.rank` or `model.lora.path` is set"
)
# CRITIC_HAS_TRUNK as a mere condition: a changed value causes a note instead of an error.
HAS_OWN_CRITIC = Condition(lambda config: not config.shares_trunk, CRITIC_HAS_TRUNK.summary)
UPDATES_SEVERAL_TIMES = Condition(
    lambda config: not config.updates_once,
    "a step takes several mini-batches or epochs",
)
CHECKPOINTS_GRADIENTS = Condition(
    lambda config: config.model.gradient_checkpointing, "`model.gradient_checkpointing` is on"
)
EXPORTS = Condition(lambda config: config.trainer.export, "`trainer.export` is on")
NORMALIZES_LENGTH = Condition(
    lambda config: "norm" in config.actor.loss_agg_mode,
    "`actor.loss_agg_mode` is seq-mean-token-sum-norm",
)
FILTERS_GROUPS = Condition(
    lambda config: config.algorithm.filter_groups.enable, "`algorithm.filter_groups.enable` is on"
)
SAMPLES_HELD_OUT = Condition(
    lambda config: config.rollout.val_kwargs.temperature > 0,
    "`rollout.val_kwargs.temperature` is more than 0: evaluations are not greedy already",
)
KEEPS_SOME = Condition(lambda config: config.rollout.keep is not None, "`rollout.keep` is set")
REWARDS_BY_RULE = Requirement(
    lambda config: not config.reward.model_path,
    "`reward.model_path` is not set",
    "samples are selected by the rewards of rules, before a reward model reads them; unset "
    "config.reward.model_path",
)
NOT_ONE_STEP_OFF = Requirement(
    lambda config: not config.rollout.one_step_off,
    "`rollout.one_step_off` is off",
    "samples are selected by the newest weights; set config.rollout.one_step_off=False",
)
HAS_ENVIRONMENT = Condition(
    lambda config: bool(config.rollout.multi_turn.environment),
    "`rollout.multi_turn.environment` is set",
)
ENGINE_RECORDS_ROUTING = Requirement(
    lambda config: config.rollout.engine == "built-in",
    "`rollout.engine` is built-in",
    "config.rollout.engine={config.rollout.engine!r} does not record it; use the built-in engine",
)
ENVIRONMENT_HAS_ENGINE = Requirement(
    lambda config: config.rollout.engine == "built-in",
    "`rollout.engine` is built-in",
    "config.rollout.engine={config.rollout.engine!r} has no environment; use the built-in engine",
)
DECODES_IN_ONE_STAGE = Requirement(
    lambda config: config.rollout.stage_length is None,
    "`rollout.stage_length` is not set",
    "dialogues are decoded in one stage; unset config.rollout.stage_length",
)
NO_PROCESS_REWARDS = Requirement(
    lambda config: not config.reward.process_rewards,
    "`reward.process_rewards` is off",
    "the environment rewards turns; set config.reward.process_rewards=False",
)
NO_OTHER_REWARD = Requirement(
    lambda config: (
        not any(
            (
                config.reward.function,
                config.reward.terms,
                config.reward.url,
                config.reward.model_path,
            )
        )
    ),
    "no other reward is set",
    "ignores the rewards that config.reward sets; unset function, terms, url and model_path "
    "there, or set config.rollout.multi_turn.reward='sum'",
)
IS_GRPO = Condition(
    lambda config: config.algorithm.adv_estimator == "grpo", "`algorithm.adv_estimator` is grpo"
)
DISCOUNTS = Condition(
    lambda config: config.algorithm.adv_estimator in ("gae", "reinforce_plus_plus"),
    "`algorithm.adv_estimator` is gae or reinforce_plus_plus",
)
LEARNS_TRUNCATED = Condition(
    lambda config: not config.algorithm.mask_truncated, "`algorithm.mask_truncated` is off"
)
NORMALIZES_REWARDS = Condition(
    lambda config: config.reward.normalize != "none", "`reward.normalize` is running or reference"
)
SCORES_IN_WORKERS = Condition(
    lambda config: config.reward.workers != 0,
    "the reward function runs in worker processes (`reward.workers` is not 0)",
)
MEASURES_REFERENCE = Condition(
    lambda config: config.reward.normalize == "reference", "`reward.normalize` is reference"
)


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and evaluation data."""

    train_files: str = option(
        "",
        "training data: files (.jsonl, .jsonl.gz, .json, .csv, .parquet; data/*.parquet), "
        "`arithmetic:COUNT`, `sums:COUNT`, `stories:COUNT`, `hf:OWNER/NAME/FILE` or "
        "`tfds:NAME/SPLIT`; separate several with commas; FILE[START:END] selects some of a file's "
        "rows; with a weight for each, as in a.jsonl*0.7,b.csv*0.3, sources are mixed in these "
        "shares",
        is_list=True,
    )
    val_files: str = option(
        "", "held-out data in the same notation; empty turns evaluation off", is_list=True
    )
    train_batch_size: int = option(64, "prompts per step", unit="prompts", at_least=1)
    val_batch_size: int = option(
        256, "prompts sampled at once in an evaluation", unit="prompts", at_least=1
    )
    val_max_samples: int | None = option(
        None,
        "number of held-out prompts to use, from the start of the files and including overlong "
        "ones; unset: all",
        unit="prompts",
        at_least=1,
    )
    train_max_samples: int | None = option(
        None,
        "number of training examples to use, from the start of the files; unset: all",
        unit="examples",
        at_least=1,
    )
    cache_dir: str = option(
        "",
        "local folder that caches the tokenized prompts of `train_files`, which must then be "
        "Parquet files: worker processes fill it once, and steps look their rows up there, so that "
        "memory does not grow with the data; empty keeps prompts in memory",
        read_by=PPO,
    )
    max_prompt_length: int = option(
        512,
        "maximum prompt length in tokens; longer prompts are dropped, truncated or rejected",
        unit="tokens",
        at_least=1,
    )
    max_response_length: int = option(
        512, "maximum response length in tokens", unit="tokens", at_least=1
    )
    filter_overlong_prompts: bool = option(
        True, "drop prompts longer than max_prompt_length and report how many"
    )
    truncation: str = option(
        "error",
        "how to treat an overlong prompt that was not dropped",
        choices=("error", "left", "right", "middle"),
    )
    prompt_key: str = option(
        "", "column of the prompt; empty: by the names of the columns, `prompt` before others"
    )
    ground_truth_key: str = option(
        "",
        "column of the reference answer; empty: by the names of the columns (ground_truth, "
        "expected_answer, final_answer, answer), or reward_model",
    )
    system_prompt: str = option(
        "", "system message at the beginning of every chat; replaces the chat's own, if it has one"
    )
    prompt_template: str = option(
        "",
        "text in which {prompt} is replaced by each prompt, or by the last message of a chat, to "
        "add instructions or solved examples; @FILE reads it from a file",
    )
    instruction: str = option(
        "", "text appended, after a space, to a prompt that is only a question or problem"
    )
    chat_template: bool = option(True, "apply the tokenizer's chat template if it has one")
    chat_template_kwargs: str = option(
        "",
        'variables of the chat template, a JSON object such as {"enable_thinking": false}; a name '
        "that the template does not read is refused",
    )
    shuffle: bool = option(True, "reshuffle in each epoch, from `seed`")
    curriculum: str = option(
        "none",
        "how training prompts are drawn: none, each once per epoch; solve_rate, by the share of "
        "correct responses to them so far: those that are always or never solved are drawn twenty "
        "times less often than those that are solved half of the time or were never drawn",
        choices=("none", "solve_rate"),
        read_by=PPO,
        requires=(REWARDS_BY_RULE, NOT_ONE_STEP_OFF),
        fixed_on_resume=True,
    )


@dataclasses.dataclass(frozen=True)
class Create:
    """The small model that is created if `model.path` is empty."""

    vocab_size: int = option(
        256,
        "maximum vocabulary size of the tokenizer that is trained on the data",
        unit="tokens",
        at_least=32,
    )
    hidden_size: int = option(128, "width of the model", at_least=8)
    intermediate_size: int = option(352, "width of the MLP", at_least=8)
    num_layers: int = option(2, "number of layers", at_least=1)
    num_heads: int = option(4, "number of query heads", at_least=1)
    num_kv_heads: int = option(2, "number of key and value heads", at_least=1)
    steps: int = option(
        140,
        "supervised steps on examples that are all solved step by step",
        unit="steps",
        at_least=1,
    )
    habit_steps: int = option(
        30,
        "supervised steps after those, on examples of which only careful_share are solved step "
        "by step",
        unit="steps",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters."""

    rank: int = option(
        0,
        "rank of the adapters that actor and critic train instead of all parameters, on one "
        "frozen base that is also the reference; 0 trains all parameters",
        at_least=0,
    )
    alpha: float = option(
        16.0,
        "the adapters' product is scaled by alpha / rank",
        above=0,
        effective_when=(HAS_ADAPTERS,),
    )
    targets: str = option(
        "all-linear",
        "projections with adapters, separated by commas: "
        + ", ".join(LORA_TARGETS)
        + "; or all-linear for all of them",
        is_list=True,
        effective_when=(HAS_ADAPTERS,),
    )
    path: str = option(
        "",
        "folder or hub name of adapters in PEFT's format that the actor starts from; they "
        "determine rank, alpha and targets",
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """The pretrained model and its computation."""

    path: str = option(
        "",
        "Hugging Face folder or hub name (OWNER/NAME or OWNER/NAME@REVISION, as for every "
        "model); empty creates a small model (see model.create)",
    )
    tokenizer_path: str = option("", "folder or hub name of the tokenizer; empty: model.path")
    dtype: str = option(
        "auto",
        "data type of the computation; trained parameters and their optimizer state are stored in "
        "the types of the optim sections, float32 by default. auto: bfloat16 on TPUs and on GPUs "
        "that have units for it (NVIDIA: compute capability 8.0), float32 elsewhere; a run prints "
        "its choice, and config.json holds it",
        choices=("auto", "bfloat16", "float32"),
    )
    gradient_checkpointing: bool = option(
        True, "recompute each layer's activations in the backward pass"
    )
    gradient_checkpointing_policy: str = option(
        "full",
        "what each layer keeps for the backward pass besides its input, instead of computing it "
        "again: full, nothing; attention, the output of attention; dots, the results of matrix "
        "products, which takes the most memory and the least time",
        choices=("full", "attention", "dots"),
        effective_when=(CHECKPOINTS_GRADIENTS,),
        fixed_on_resume=False,
    )
    attention: str = option(
        "auto",
        "attention implementation for whole sequences: xla runs everywhere; cudnn on NVIDIA GPUs "
        "in bfloat16; splash on TPU if packing.row_length is unset or a multiple of 128; auto: the "
        "platform's own if it can run. A run prints what it uses, unless that is xla alone",
        choices=("auto", "xla", "cudnn", "splash"),
    )
    lora: Lora = section(Lora, read_by=PPO)
    create: Create = section(Create, read_by=PPO)


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1e-6, "peak learning rate", above=0)
    lr_warmup_steps: int = option(
        0,
        "steps of linear warm-up, counting only steps that train this model",
        unit="steps",
        at_least=0,
    )
    lr_schedule: str = option(
        "constant",
        "schedule after the warm-up, until the last step",
        choices=("constant", "linear", "cosine"),
    )
    min_lr_ratio: float = option(
        0.0, "share of lr that remains at the end of linear and cosine", at_least=0, at_most=1
    )
    beta1: float = option(0.9, "AdamW's beta1", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW's beta2", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)
    weight_decay: float = option(
        0.01, "AdamW's weight decay; applies to matrices only, not to norms and biases", at_least=0
    )
    param_dtype: str = option(
        "float32",
        "type in which trained parameters are stored between optimizer steps, which are computed "
        "in float32; bfloat16 rounds stochastically, so that small steps count on average",
        choices=STORED_DTYPES,
        fixed_on_resume=True,
    )
    moments_dtype: str = option(
        "float32",
        "type in which AdamW's moments are stored; bfloat16 rounds stochastically",
        choices=STORED_DTYPES,
        fixed_on_resume=True,
    )
    gradient_dtype: str = option(
        "float32",
        "type of the sum of gradients over micro-batches; bfloat16 rounds stochastically",
        choices=STORED_DTYPES,
    )


@dataclasses.dataclass(frozen=True)
class CriticOptim(Optim):
    """AdamW with a higher default learning rate, for models with a new head."""

    # A head that starts at zero has farther to go than a pretrained policy.
    lr: float = option(1e-5, "peak learning rate", above=0)


@dataclasses.dataclass(frozen=True)
class RouterReplay:
    """Replay of the experts that the sampler selected, in the actor's scoring and update."""

    mode: str = option(
        "disabled",
        "for a mixture of experts: R3 (routing replay) sends each token, in the actor's scoring "
        "and update, through the experts that it passed through in sampling, weighted by the "
        "trained router's probabilities; disabled: routers select experts anew in each pass",
        choices=("disabled", "R3"),
        requires=(ENGINE_RECORDS_ROUTING,),
    )


@dataclasses.dataclass(frozen=True)
class Actor:
    """The policy's loss and update."""

    optim: Optim = section(Optim)
    router_replay: RouterReplay = section(RouterReplay)
    grad_clip: float = option(1.0, "maximum global gradient norm", above=0)
    optimizer_offload: bool = option(
        False,
        "keep the optimizer state in the host's memory; its update copies it to the device, which "
        "leaves memory there for scoring and decoding",
    )
    ppo_mini_batch_size: int = option(
        64,
        "prompts per optimizer step, counted as rollout.n samples each (or rollout.keep); the "
        "samples of a rollout are shuffled one by one",
        unit="prompts",
        at_least=1,
    )
    ppo_micro_batch_size_per_device: int | None = option(
        None,
        "packed rows that a device processes at once; unset: a sixteenth of the samples, up to a "
        "quarter for 1,024 tokens (for 8,192 with mesh.fsdp, where each gathers the weights), and "
        "at most 8,192 tokens",
        unit="rows",
        at_least=1,
    )
    ppo_epochs: int = option(1, "passes over one rollout, each freshly shuffled", at_least=1)
    clip_ratio: float = option(
        0.2, "the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]", above=0, below=1
    )
    clip_ratio_low: float | None = option(
        None, "clip range below 1; unset: clip_ratio", above=0, below=1
    )
    clip_ratio_high: float | None = option(None, "clip range above 1; unset: clip_ratio", above=0)
    clip_ratio_c: float | None = option(
        3.0, "dual clip's constant for negative advantages; 0 turns it off", at_least=0
    )
    policy_loss: str = option(
        "vanilla",
        "loss of each token: vanilla (PPO's clip), importance (unclipped ratio), gspo "
        "(sequence-level ratio), gmpo, cispo, reinforce (no ratio), or your own: `module:function` "
        "or `file.py:function`, called as described in kernels/policy_losses.py",
    )
    entropy_coeff: float = option(0.0, "weight of the entropy bonus", at_least=0)
    router_aux_loss_coef: float = option(
        0.0,
        "weight of the load-balancing loss of a mixture of experts, a mean over sequences and "
        "layers, k if all experts are used equally",
        at_least=0,
    )
    use_kl_loss: bool = option(
        False, "add the KL to the reference to the actor's loss", requires=(USES_REFERENCE,)
    )
    kl_loss_coef: float = option(0.001, "weight of that KL", at_least=0)
    kl_loss_type: str = option(
        "k3",
        "estimator of that KL; k1 has no restraining effect here; k3+ has the value of k3 and "
        "the gradient of k2; full sums over the vocabulary, at the cost of another pass of the "
        "reference in each micro-batch; or your own: `module:function` or `file.py:function`, "
        "a function of the tokens' log-ratios (kernels/kl.py)",
        choices=("k1", "abs", "k2", "k3", "k3+", "clamped", "full"),
        is_plugin=True,
        aliases=VERL_KINDS,
    )
    target_kl: float | None = option(
        None,
        "once a mini-batch's approximate KL to the policy at the start of the step exceeds 1.5 "
        "times this, the actor skips the remaining mini-batches of the step; unset: never",
        unit="nats per token",
        above=0,
        effective_when=(UPDATES_SEVERAL_TIMES,),
    )
    loss_agg_mode: str = option(
        "token-mean",
        "how the token losses of a mini-batch are averaged",
        choices=AGGREGATIONS,
    )
    loss_scale_factor: int | None = option(
        None,
        "divisor of seq-mean-token-sum-norm; unset: data.max_response_length",
        unit="tokens",
        at_least=1,
        effective_when=(NORMALIZES_LENGTH,),
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The policy that the KL is measured to."""

    path: str = option(
        "",
        "folder or hub name of the reference, of the actor's architecture; empty: the policy that "
        "the run starts from",
        requires=(REFERENCE_IS_SEPARATE,),
        fixed_on_resume=True,
    )


@dataclasses.dataclass(frozen=True)
class Critic:
    """The value function's model, loss and update."""

    path: str = option(
        "",
        "folder or hub name that the critic starts from; empty: model.path. With model.lora: "
        "adapters in PEFT's format for the weights of model.path",
        requires=(HAS_CRITIC, CRITIC_HAS_TRUNK),
        fixed_on_resume=True,
    )
    keep_head: bool | None = option(
        None,
        "start the critic with the scalar head in critic.path, such as a reward model's; off: "
        "with a head of zeros; unset: on where critic.path holds a critic, as a run exports it",
        requires=(HAS_CRITIC, CRITIC_HAS_TRUNK, CRITIC_HAS_PATH),
        fixed_on_resume=True,
    )
    shared_trunk: bool = option(
        False,
        "make the critic a scalar head on the actor's trunk instead of a model of its own: one "
        "forward and backward pass serves both losses, the actor minimizes their sum (with "
        "value_loss_coef), and the head trains at actor.optim.lr and stops with actor.target_kl",
        requires=(HAS_CRITIC,),
        fixed_on_resume=True,
    )
    optim: CriticOptim = section(CriticOptim, effective_when=(HAS_OWN_CRITIC,))
    grad_clip: float = option(
        1.0, "maximum global gradient norm", above=0, effective_when=(HAS_OWN_CRITIC,)
    )
    optimizer_offload: bool = option(
        False,
        "keep the optimizer state in the host's memory; its update copies it to the device, which "
        "leaves memory there for scoring and decoding",
        effective_when=(HAS_OWN_CRITIC,),
    )
    param_offload: bool = option(
        False,
        "keep the critic's parameters in the host's memory; its scoring and its update copy them "
        "to the device, which leaves memory there for decoding and the actor",
        effective_when=(HAS_OWN_CRITIC,),
    )
    ppo_mini_batch_size: int | None = option(
        None,
        "as the actor's; unset: the actor's",
        unit="prompts",
        at_least=1,
        requires=(CRITIC_HAS_TRUNK,),
        effective_when=(HAS_CRITIC,),
    )
    ppo_micro_batch_size_per_device: int | None = option(
        None,
        "as the actor's; unset: the actor's",
        unit="rows",
        at_least=1,
        requires=(CRITIC_HAS_TRUNK,),
    )
    ppo_epochs: int | None = option(
        None,
        "as the actor's; unset: the actor's",
        at_least=1,
        requires=(CRITIC_HAS_TRUNK,),
        effective_when=(HAS_CRITIC,),
    )
    loss_agg_mode: str | None = option(
        None,
        "as the actor's; unset: the actor's",
        choices=AGGREGATIONS,
        requires=(CRITIC_HAS_TRUNK,),
    )
    cliprange_value: float | None = option(
        0.5,
        "how far a new value may move from the old one in the loss; 0 turns it off",
        at_least=0,
    )
    value_loss_coef: float = option(
        1.0,
        "weight of the value loss (it scales the reported loss and the gradient norm)",
        above=0,
    )
    router_aux_loss_coef: float = option(
        0.0,
        "weight of the load-balancing loss of the critic's experts, as for the actor",
        at_least=0,
        effective_when=(HAS_OWN_CRITIC,),
    )
    huber_delta: float | None = option(
        None,
        "error above which the loss grows linearly (Huber), in units of reward, or in standard "
        "deviations with normalize_values; unset: squared error",
        above=0,
        effective_when=(HAS_CRITIC,),
    )
    normalize_values: bool = option(
        False,
        "train the critic on returns normalized by their running mean and standard deviation; "
        "cliprange_value then counts in standard deviations",
        requires=(HAS_CRITIC,),
        fixed_on_resume=True,
    )


@dataclasses.dataclass(frozen=True)
class KLControl:
    """The coefficient of the KL to the reference."""

    type: str = option(
        "fixed",
        "how the coefficient changes: fixed, not at all; adaptive, towards target_kl",
        choices=("fixed", "adaptive"),
        requires=(USES_KL_COEFFICIENT,),
    )
    kl_coef: float = option(
        0.001,
        "coefficient (the initial one if adaptive)",
        at_least=0,
        first_step_only=KL_COEFFICIENT_ADAPTS,
    )
    target_kl: float = option(
        0.1,
        "KL that the adaptive controller aims at, per target_unit",
        unit="nats",
        above=0,
    )
    target_unit: str = option(
        "token",
        "quantity that target_kl is the target of: token, the mean KL per token (verl); sequence, "
        "the KL summed over a response, averaged over responses (OpenAI's 6)",
        choices=("token", "sequence"),
    )
    horizon: int = option(
        10_000, "samples over which the adaptive controller acts", unit="samples", at_least=1
    )


@dataclasses.dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO): prompts whose responses earn equal rewards are replaced."""

    enable: bool = option(
        False,
        "replace prompts whose responses all earned the same reward, from which a comparison of "
        "responses learns nothing, by further prompts of the data",
        requires=(REWARDS_BY_RULE, NOT_ONE_STEP_OFF),
    )
    metric: str = option(
        "score",
        "what must differ: score, the reward of the rules; accuracy, whether responses are correct",
        choices=("score", "accuracy"),
        aliases={"acc": "accuracy", "seq_reward": "score", "seq_final_reward": "score"},
        effective_when=(FILTERS_GROUPS,),
    )
    max_num_gen_batches: int = option(
        10,
        "maximum number of batches of train_batch_size prompts that a step samples; prompts with "
        "equal rewards fill the places that are then still empty",
        unit="batches",
        at_least=1,
        effective_when=(FILTERS_GROUPS,),
    )


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Advantages, returns and the KL to the reference."""

    adv_estimator: str = option(
        "gae",
        "how advantages are estimated: gae, with a critic; without one grpo, rloo and "
        "reinforce_plus_plus_baseline (compared with a prompt's other responses), "
        "reinforce_plus_plus (discounted reward to go), or your own: `module:function` or "
        "`file.py:function`, called as described in ppo/advantages.py",
        choices=("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        is_plugin=True,
        fixed_on_resume=True,
    )
    gamma: float = option(
        1.0, "discount per token", at_least=0, at_most=1, effective_when=(DISCOUNTS,)
    )
    lam: float = option(1.0, "GAE's lambda", at_least=0, at_most=1, effective_when=(HAS_CRITIC,))
    critic_lam: float | None = option(
        None,
        "lambda of the returns that the critic is trained on; unset: lam",
        at_least=0,
        at_most=1,
        effective_when=(HAS_CRITIC,),
    )
    lam_length_alpha: float | None = option(
        None,
        "lambda of the advantages is 1 - 1 / (this x response length), 0.05 in VAPO; unset: lam",
        above=0,
        effective_when=(HAS_CRITIC,),
    )
    bootstrap_truncated: bool = option(
        False,
        "use the critic's value, instead of 0, after a response that was cut off",
        requires=(HAS_CRITIC,),
        effective_when=(LEARNS_TRUNCATED,),
    )
    mask_truncated: bool = option(
        False,
        "leave responses that were cut off out of the losses; the baselines of other responses, "
        "whitened rewards and running moments still include their scores",
    )
    norm_adv_by_std_in_grpo: bool = option(
        True,
        "grpo divides by the standard deviation of a prompt's rewards; off: Dr. GRPO",
        effective_when=(IS_GRPO,),
    )
    whiten_rewards: bool = option(
        False, "scale token rewards to variance 1 over the whole rollout, keeping their mean"
    )
    whiten_advantages: bool | None = option(
        None,
        "scale advantages to variance 1 over the whole rollout; unset: with gae, "
        "reinforce_plus_plus and reinforce_plus_plus_baseline",
    )
    use_kl_in_reward: bool = option(
        False,
        "subtract kl_ctrl's coefficient times the KL estimate from each token's reward",
        requires=(USES_REFERENCE,),
    )
    use_reference: bool = option(
        True,
        "keep the initial policy, or that of reference.path, frozen (with model.lora: the base "
        "without adapters) and measure the KL to it at each step",
    )
    reference_offload: bool = option(
        False,
        "keep the reference in the host's memory; the programs that read it copy it to the device, "
        "which leaves memory there for decoding and the other updates",
        requires=(REFERENCE_IS_SEPARATE,),
    )
    kl_penalty: str = option(
        "k1",
        "estimator of that KL; full sums over the vocabulary. In the reward only k1 follows the "
        "gradient of the KL (kernels/kl.py). Or your own, as for actor.kl_loss_type",
        choices=("k1", "abs", "k2", "k3", "clamped", "full"),
        is_plugin=True,
        aliases=VERL_KINDS,
    )
    kl_ctrl: KLControl = section(KLControl)
    filter_groups: FilterGroups = section(FilterGroups)
    rollout_is: str = option(
        "none",
        "importance weights of the policy loss (not of KL and returns), for tokens drawn by "
        "older weights (rollout.one_step_off) or under the sampler's rounding: per token, or per "
        "sequence",
        choices=("none", "token", "sequence"),
    )
    rollout_is_threshold: float = option(2.0, "upper bound of those weights", at_least=1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of drawing tokens."""

    temperature: float = option(0.0, "divides the logits; 0 is greedy", at_least=0)
    top_k: int = option(-1, "draw from the k most likely tokens; -1: from all", at_least=-1)
    top_p: float = option(
        1.0,
        "draw from the most likely tokens that together hold this probability",
        above=0,
        at_most=1,
    )
    n: int = option(1, "responses per prompt", unit="responses", at_least=1)


@dataclasses.dataclass(frozen=True)
class EvaluationSampling(Sampling):
    """Sampling for evaluations."""

    and_greedy: bool = option(
        False,
        "evaluations also take one greedy response per prompt, and report its figures as "
        "eval/greedy/NAME, in addition to those of the sampled ones",
        effective_when=(SAMPLES_HELD_OUT,),
    )


@dataclasses.dataclass(frozen=True)
class RolloutMesh:
    """The mesh for decoding, over the devices of `mesh`.

    It has no fsdp axis: decoding reads every weight for each token.
    """

    model: int | None = option(
        None,
        "devices that split each matrix while decoding; weights are laid out for them once per "
        "step. Unset: decoding uses `mesh`",
        unit="devices",
        at_least=1,
    )
    data: int = option(
        -1,
        "groups of devices, each with a whole copy of the weights, that decode samples of their "
        "own; -1 uses the devices that the other two axes leave",
        unit="groups",
        at_least=-1,
        requires=(HAS_ROLLOUT_MESH,),
    )
    context: int = option(
        1,
        "devices that split the keys and values of each sequence in the cache, for responses whose "
        "cache does not fit on one device; each of them has a copy of the weights",
        unit="devices",
        at_least=1,
        requires=(HAS_ROLLOUT_MESH,),
    )


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    """Dialogues: responses of several turns, which an environment answers."""

    environment: str = option(
        "",
        "class of the environment, `module:Class` or `file.py:Class`, as in "
        "environments/protocol.py; its observations become tokens of the response, which all "
        "losses ignore. Empty: a response is one turn",
        requires=(ENVIRONMENT_HAS_ENGINE, DECODES_IN_ONE_STAGE, NO_PROCESS_REWARDS),
    )
    max_assistant_turns: int | None = option(
        None,
        "turns of the policy after which a response is cut off; unset: until the environment ends "
        "it or data.max_response_length is reached",
        unit="turns",
        at_least=1,
        effective_when=(HAS_ENVIRONMENT,),
    )
    max_turn_length: int | None = option(
        None,
        "tokens after which a turn ends without an EOS or a string of rollout.stop; unset: "
        "data.max_response_length",
        unit="tokens",
        at_least=1,
        effective_when=(HAS_ENVIRONMENT,),
    )
    max_observation_length: int = option(
        64,
        "maximum number of tokens of an observation of an environment on the host; longer ones are "
        "truncated",
        unit="tokens",
        at_least=1,
        effective_when=(HAS_ENVIRONMENT,),
    )
    timeout: float = option(
        60.0,
        "longest time that a `step` of an environment on the host may take, the first one with "
        "`reset`; if it is exceeded, the dialogue ends with a reward of 0 for that turn",
        unit="seconds",
        above=0,
        effective_when=(HAS_ENVIRONMENT,),
    )
    reward: str = option(
        "sum",
        "sum: the environment's rewards of turns and the reward of the whole response; "
        "environment: only the environment's",
        choices=("sum", "environment"),
        requires=(NO_OTHER_REWARD,),
        effective_when=(HAS_ENVIRONMENT,),
    )


@dataclasses.dataclass(frozen=True)
class RolloutOptions(Sampling):
    """Sampling for training."""

    # Training cannot be greedy: a policy gradient needs samples.
    temperature: float = option(
        1.0, "divides the logits, in sampling and in every scoring pass", above=0
    )
    engine: str = option(
        "built-in",
        "what generates the responses: built-in (on the run's own mesh), or an implementation of "
        "sampler/engine.py's RolloutEngine: `module:Class` or `file.py:Class`, constructed with "
        "mesh, actor and params",
    )
    max_num_seqs: int = option(
        256,
        "samples that a device decodes at once; the others wait and take the slot of one that "
        "has ended; 0: as many as fit into the memory that devices report, besides the weights, "
        "and 256 on platforms that report none",
        unit="samples",
        at_least=0,
    )
    stage_length: int | None = option(
        None,
        "decode in stages: all responses up to this length first, then those that have not ended "
        "up to twice, four times, ... this length, with as many fewer slots, in the same memory. "
        "If few responses approach data.max_response_length, the cache takes a fraction of the "
        "memory. Samples do not change. Unset: one stage with room for the longest response",
        unit="tokens",
        at_least=1,
        requires=(HAS_BUILT_IN_ENGINE,),
    )
    stop: str = option(
        "",
        "strings that end a response (a turn, with rollout.multi_turn.environment), in training "
        "and in evaluations: a single string, or a JSON list "
        'such as ["Question:", "\\n\\n"]. They are found regardless of token boundaries; the token '
        "that completes one is the last of the response",
        is_json=True,
    )
    min_new_tokens: int = option(
        0,
        "number of tokens of a response before which no EOS is drawn and `rollout.stop` is not "
        "searched for",
        unit="tokens",
        at_least=0,
    )
    bad_words: str = option(
        "",
        "strings that no response contains, in the notation of rollout.stop: no token that would "
        "complete one is drawn",
        is_json=True,
    )
    logit_bias: str = option(
        "",
        "TOKEN:BIAS pairs separated by commas, where TOKEN is an id: each bias is added to the "
        "token's logit before a draw, in training and in evaluations",
        is_list=True,
    )
    attention: str = option(
        "auto",
        "attention implementation that reads the cache: xla runs everywhere; cudnn, if "
        "model.attention is cudnn too, reads each sequence up to its end but has no sliding "
        "window; auto: cudnn if it can run",
        choices=("auto", "xla", "cudnn"),
    )
    quantization: str = option(
        "none",
        "how the copy of the weights that decodes stores the layers' kernels: none, in the type of "
        "model.dtype; int8, with a float32 scale per column, in half the memory of bfloat16; "
        "samples, also those of evaluations, are then drawn from a slightly different policy than "
        "the one that is scored, which `algorithm.rollout_is` corrects in training",
        choices=("none", "int8"),
        requires=(HAS_BUILT_IN_ENGINE,),
    )
    logprob_micro_batch_size_per_device: int | None = option(
        None,
        "packed rows that a device scores at once; unset: as for the actor",
        unit="rows",
        at_least=1,
    )
    reuse_logprobs: str = option(
        "auto",
        "use the sampler's log-probs as the old policy's instead of computing them again: "
        "`always`, with first ratios that differ from 1 by the rounding of two programs (by "
        "percents in bfloat16); `never`; `auto`: if that introduces no bias, in float32 on CPU "
        "and, without a KL in the reward or an adaptive one, in a step of one optimizer step",
        choices=("auto", "always", "never"),
    )
    one_step_off: bool = option(
        False,
        "sample the next batch before a step's update instead of after it, while the host "
        "computes the step's rewards. Checkpoints contain that batch, so that a resumed run is "
        "identical",
        requires=(HAS_IMPORTANCE_WEIGHTS,),
    )
    keep: int | None = option(
        None,
        "responses per prompt that the update learns from, of the n that are sampled; unset: all",
        unit="responses",
        at_least=1,
        requires=(REWARDS_BY_RULE, NOT_ONE_STEP_OFF),
    )
    keep_by: str = option(
        "spread",
        "which responses are kept: spread, those whose scores differ most (PODS); best, those "
        "with the highest scores",
        choices=("spread", "best"),
        effective_when=(KEEPS_SOME,),
    )
    multi_turn: MultiTurn = section(MultiTurn)
    mesh: RolloutMesh = section(RolloutMesh)
    val_kwargs: EvaluationSampling = section(EvaluationSampling)


@dataclasses.dataclass(frozen=True)
class Reward:
    """Reward functions, reward models, and the shaping of scores."""

    function: str = option(
        "",
        "`module:function` called as f(data_source, solution_str, ground_truth, extra_info); or, "
        "for a whole batch, as f(data_sources, solution_strs, ground_truths, extra_infos), as in "
        "verl, or f(prompts, completions, completion_ids, **columns), as in TRL; or async; "
        "empty: the built-in rule for each row's data_source",
    )
    terms: str = option(
        "",
        "what the reward adds up, RULE:WEIGHT separated by commas: names of built-in rules, some "
        "with an argument (gsm8k, gsm8k[flexible], math, math_dapo, multiple_choice, exact, "
        "search_qa, regex, json_schema, arithmetic, sums, stories, format[think,answer], "
        "length[5:200]), `auto` (the rule of each row's data_source), `model` (the reward model), "
        "or file.py:function. Each term's score is a metric",
    )
    url: str = option(
        "",
        "address of a server that scores responses: `http://HOST/PATH`, called with a JSON object "
        "of prompt, response, ground_truth and data_source, or with url_model as in OpenAI's chat "
        "completions. Its score is the whole reward, or the term `judge`. The environment variable "
        "JAX_PPO_REWARD_KEY is sent as a bearer token; reward.workers calls are made at a time",
    )
    url_model: str = option(
        "",
        "name of the judging model; its reply contains the score as JSON or as its last number",
        requires=(HAS_REWARD_URL,),
    )
    url_prompt: str = option(
        "Rate the response to the prompt from 0 to 10. End with the number.\n\n"
        "Prompt:\n{prompt}\n\nResponse:\n{response}",
        "prompt of the judging model; it may also contain {ground_truth}",
        requires=(HAS_REWARD_URL,),
    )
    url_timeout: float = option(
        15.0,
        "longest time that one call may take",
        unit="seconds",
        above=0,
        requires=(HAS_REWARD_URL,),
    )
    url_retries: int = option(
        3,
        "retries of a call that failed, was refused as one too many (429) or met a server error",
        at_least=0,
        requires=(HAS_REWARD_URL,),
    )
    gsm8k_method: str = option(
        "strict",
        "which number is the answer: strict, the one after `####`; flexible, the last one",
        choices=("strict", "flexible"),
    )
    fallback_score: float = option(
        0.0, "score of a sample whose rule raised an error, ran out of time or ended its process"
    )
    workers: int | None = option(
        None,
        "worker processes that the reward function runs in, per process of the run; a worker that "
        "hangs or dies is replaced and costs only its sample; 0: the function runs in the run's "
        "own process; unset: 1 for user-defined functions and for rules without a time bound "
        "(math, regex, json_schema), 0 for others",
        unit="processes",
        at_least=0,
    )
    timeout: float = option(
        60.0,
        "longest time that the reward function may take for one response in a worker",
        unit="seconds",
        above=0,
        effective_when=(SCORES_IN_WORKERS,),
    )
    max_timeouts: int = option(
        8,
        "when this many consecutive responses of a batch, in its order, have run out of time, the "
        "rest of it counts as failed at once; a function for whole batches has one time limit for "
        "all of them instead",
        unit="responses",
        at_least=1,
    )
    max_failed_steps: int = option(
        3,
        "the run stops when the rule has failed on every response of this many consecutive steps, "
        "or of one held-out evaluation",
        unit="steps",
        at_least=1,
    )
    model_path: str = option(
        "",
        "folder or hub name of a reward model (sequence classification with one label: a "
        "decoder, or DeBERTa-v2 or v3); its score is added to reward.function's, or is the whole "
        "reward if that is empty",
        fixed_on_resume=True,
    )
    param_offload: bool = option(
        False,
        "keep the reward model in the host's memory; scoring copies it to the device, which leaves "
        "memory there for decoding and the updates",
        requires=(HAS_REWARD_MODEL,),
    )
    model_input: str = option(
        "auto",
        "what the reward model reads, in its own tokens: chat (its own chat template), pair (the "
        "prompt and the response), text (the two concatenated); auto: pair for an encoder; for a "
        "decoder the sampled tokens unchanged if it has the actor's vocabulary and no other chat "
        "template, else chat if there is a template, else text",
        choices=("auto", "chat", "pair", "text"),
        requires=(HAS_REWARD_MODEL,),
        fixed_on_resume=True,
    )
    max_length: int | None = option(
        None,
        "maximum input length of the reward model, in its own tokens; longer inputs lose the "
        "start of their prompts; unset: the value in its config.json",
        unit="tokens",
        at_least=16,
        requires=(HAS_REWARD_MODEL,),
    )
    micro_batch_size_per_device: int | None = option(
        None,
        "packed rows of the reward model's own tokens that a device scores at once; unset: chosen "
        "by their number and length",
        unit="rows",
        at_least=1,
        requires=(HAS_REWARD_MODEL,),
    )
    score_position: str = option(
        "auto",
        "the token at which a decoder's score is read: auto, as in transformers, the last one that "
        "is not the pad token of its config.json; last_token, the last one, even if that is the "
        "pad token",
        choices=("auto", "last_token"),
        requires=(HAS_REWARD_MODEL,),
        fixed_on_resume=True,
    )
    process_rewards: bool = option(
        False,
        "the dict from reward.function may contain `step_rewards`, a list of (characters of the "
        "response up to the step's end, reward): each is earned by the token that reaches that "
        "end, and is exempt from normalization and clipping of scores; estimators that compare "
        "responses use the sum",
        requires=(HAS_REWARD_FUNCTION,),
    )
    normalize: str = option(
        "none",
        "divide scores by their standard deviation: running, over all so far; reference, over "
        "normalize_samples of the initial policy, measured before the first step",
        choices=("none", "running", "reference"),
        fixed_on_resume=True,
    )
    normalize_shift: bool = option(
        True, "also subtract the mean from normalized scores", effective_when=(NORMALIZES_REWARDS,)
    )
    normalize_samples: int = option(
        256,
        "responses measured for `reference`, rounded up to whole batches",
        unit="responses",
        at_least=2,
        first_step_only=MEASURES_REFERENCE,
        effective_when=(MEASURES_REFERENCE,),
    )
    clip: float | None = option(
        None,
        "clip scores, after any normalization, to +- this; unset: no clipping",
        above=0,
    )
    missing_eos_penalty: float = option(
        0.0, "subtracted from the score of a response that was cut off", at_least=0
    )
    overlong_buffer_len: int = option(
        0,
        "final tokens of max_response_length over which overlong_penalty_factor grows from 0 "
        "(DAPO); 0: no penalty",
        unit="tokens",
        at_least=0,
    )
    overlong_penalty_factor: float = option(
        1.0, "subtracted from the score at max_response_length", at_least=0
    )
    length_penalty: float = option(
        0.0, "subtracted from the score for each token of the response", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class Supervised:
    """Supervised fine-tuning and reward-model training."""

    optim: CriticOptim = section(CriticOptim)
    grad_clip: float = option(1.0, "maximum global gradient norm", above=0)
    micro_batch_size_per_device: int | None = option(
        None,
        "packed rows that a device processes at once; unset: a sixteenth of the batch, up to a "
        "quarter for 1,024 tokens (for 8,192 with mesh.fsdp, where each gathers the weights), and "
        "at most 8,192 tokens",
        unit="rows",
        at_least=1,
    )
    response_key: str = option(
        "",
        "column of the response, or its name in extra_info; empty: by the names of the columns "
        "(chosen, a chat's last message, completion, response, output, solution, answer)",
        read_by=("sft",),
        fixed_on_resume=True,
    )
    router_aux_loss_coef: float = option(
        0.0,
        "weight of the load-balancing loss of a mixture of experts, a mean over sequences and "
        "layers",
        at_least=0,
        fixed_on_resume=True,
    )
    center_coef: float = option(
        0.0,
        "weight of the squared sum of a pair's scores, which pulls their mean to 0",
        at_least=0,
        read_by=("reward_model",),
        fixed_on_resume=True,
    )


@dataclasses.dataclass(frozen=True)
class Packing:
    """Packing of several samples into one row."""

    enabled: bool = option(True, "pack several samples into a row; off: one sample per row, padded")
    row_length: int | None = option(
        None,
        "tokens per row; unset: max_prompt_length + max_response_length, rounded up on TPU to a "
        "multiple of 128, 256 or 512 for splash attention; in supervised training the length of "
        "the longest example or slightly more",
        unit="tokens",
        at_least=2,
    )


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The axes of the device mesh."""

    data: int = option(
        -1,
        "replicas of the parameters; -1 uses the devices that the other axes leave",
        unit="devices",
        at_least=-1,
    )
    fsdp: int = option(
        1,
        "devices that share one copy of parameters and optimizer state; -1 as for data",
        unit="devices",
        at_least=-1,
    )
    model: int = option(
        1,
        "devices that split each matrix (tensor parallelism); -1 as for data",
        unit="devices",
        at_least=-1,
    )
    stage: int = option(
        1,
        "stages that split the layers (pipeline parallelism) in scoring and training: each has the "
        "same number of layers and passes the hidden states on to the next, one packed row per "
        "device at a time; in decoding, and outside the layers, they split rows as data does",
        unit="devices",
        at_least=1,
    )
    context: int = option(
        1,
        "devices that split the tokens of each packed row (context parallelism) in scoring and "
        "training, for long responses; otherwise they act like those of fsdp",
        unit="devices",
        at_least=1,
    )
    expert: int = option(
        1,
        "devices that divide the experts of a mixture of experts among them; for all other "
        "parameters they act like those of fsdp",
        unit="devices",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Addresses by which the processes of a multi-host run connect."""

    coordinator_address: str = option(
        "",
        "address of process 0, HOST:PORT; empty: read from the TPU pod or Slurm, or a single "
        "process",
    )
    num_processes: int = option(
        0, "number of processes, with coordinator_address", unit="processes", at_least=0
    )
    process_id: int = option(
        -1, "index of this process, from 0, with coordinator_address", at_least=-1
    )
    heartbeat_seconds: int = option(
        30,
        "a process that is silent for this long is considered dead",
        unit="seconds",
        at_least=10,
    )
    stall_seconds: int = option(
        1800,
        "a run without progress for this long, for example because a device or the network hangs, "
        "prints the stacks of its threads and ends with a line that names the phase; 0: no limit",
        unit="seconds",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Duration, evaluation, checkpoints and logs of a run."""

    total_epochs: int = option(1, "passes over the training data", unit="epochs", at_least=1)
    total_training_steps: int | None = option(
        None,
        "total number of steps; unset: determined by total_epochs",
        unit="steps",
        at_least=1,
    )
    critic_warmup: int = option(
        0,
        "initial steps in which only the critic is trained",
        unit="steps",
        at_least=0,
        read_by=PPO,
        requires=(HAS_CRITIC, CRITIC_HAS_TRUNK),
    )
    test_freq: int = option(
        10,
        "steps between evaluations; 0: only the last step; -1: never",
        unit="steps",
        at_least=-1,
    )
    val_before_train: bool = option(True, "evaluate before the first step")
    save_freq: int = option(
        50,
        "steps between checkpoints; 0: only the last step; -1: never (but before a preemption)",
        unit="steps",
        at_least=-1,
    )
    max_checkpoints: int = option(
        2, "number of recent checkpoints to keep, besides the best one", at_least=1
    )
    local_dir: str = option(
        "",
        "folder on a disk of each machine, in which each process keeps its part of the newest "
        "states between checkpoints; a restart of the processes on the same machines resumes from "
        "it; empty: none",
        read_by=PPO,
        requires=(SAMPLES_WITHIN_STEP,),
    )
    local_save_freq: int = option(
        5,
        "steps between states kept in local_dir",
        unit="steps",
        at_least=1,
        read_by=PPO,
        effective_when=(HAS_LOCAL_DIR,),
    )
    best_metric: str = option(
        "accuracy",
        "metric that selects the best checkpoint, among steps both evaluated and saved",
        choices=("accuracy", "reward_mean"),
        read_by=PPO,
    )
    resume: bool = option(
        True,
        "resume from the newest checkpoint in the work directory; if not, refuse one that has any",
    )
    resume_with_changed_data: bool = option(
        False,
        "resume although the training rows, or their order, are no longer the checkpoint's: the "
        "run goes on with the first rows of a new epoch of the new data; if not, refuse. Files "
        "that only moved are the same data",
    )
    export: bool = option(
        True,
        "write the trained model as a Hugging Face folder at the end (WORKDIR/actor, or "
        "reward_model), and adapters also in PEFT's format (WORKDIR/adapter)",
    )
    export_critic: bool = option(
        True,
        "also write the critic (WORKDIR/critic), which critic.path reads and transformers loads as "
        "a classifier of tokens; its adapters in PEFT's format",
        effective_when=(EXPORTS, HAS_CRITIC),
    )
    export_dtype: str = option(
        "float32",
        "type of the weights in the exported folder; adapters are always float32",
        choices=("bfloat16", "float32"),
        effective_when=(EXPORTS,),
    )
    warn_entropy_below: float = option(
        0.005,
        "warn when the mean entropy falls below this; 0: never",
        unit="nats per token",
        at_least=0,
        read_by=PPO,
    )
    warn_kl_above: float = option(
        1.0,
        "warn when the mean KL to the reference rises above this; 0: never",
        unit="nats per token",
        at_least=0,
        read_by=PPO,
    )
    max_skipped_updates: int = option(
        10,
        "stop after this many consecutive steps with a non-finite gradient",
        unit="steps",
        at_least=1,
    )
    log_samples: int = option(
        3, "responses shown at each evaluation", unit="responses", at_least=0, read_by=PPO
    )
    show_first_step: bool = option(
        False,
        "print the shapes and masks of the first step, and one of its samples token by token: "
        "log-probs, KL, values, advantages and returns",
        read_by=PPO,
    )
    log_optimizer_steps: bool = option(
        False,
        "write loss, KL, clip fraction, gradient norm and the other metrics of each optimizer step "
        "to WORKDIR/optimizer_steps_ROLE.csv; training_metrics.csv has their means over a step",
        read_by=PPO,
    )
    log_rollouts_freq: int = option(
        10,
        "steps between those whose responses are written to WORKDIR/rollouts and report.html, in "
        "addition to the first; 0: never",
        unit="steps",
        at_least=0,
        read_by=PPO,
    )
    log_rollouts: int = option(
        32,
        "responses that are written in such a step, spread over its prompts",
        unit="responses",
        at_least=0,
        read_by=PPO,
    )
    compilation_cache: str = option(
        "",
        "folder in which compiled programs are kept for later runs; `off` keeps none; empty: "
        "JAX_COMPILATION_CACHE_DIR if set, else jax_ppo/compiled in the user's cache folder",
    )
    logger: str = option(
        "tensorboard",
        "loggers of curves besides the CSV, separated by commas: tensorboard, wandb, mlflow (on "
        "the server of MLFLOW_TRACKING_URI, or in the work directory), or empty. console is "
        "accepted, although it always shows the steps",
        is_list=True,
    )
    project_name: str = option("jax_ppo", "project in wandb, experiment in mlflow")
    wandb_entity: str = option("", "user or team in wandb; empty: wandb's default")
    tags: str = option("", "tags of the run in wandb and mlflow, separated by commas", is_list=True)
    plot_freq: int = option(
        20,
        "steps between updates of training_curves.png and report.html, besides those at "
        "evaluations; 0: at evaluations only",
        unit="steps",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run."""

    experiment_name: str = option("ppo", "names the work directory output/NAME")
    seed: int = option(
        0, "seed of all randomness", at_least=0, at_most=2**32 - 1, fixed_on_resume=True
    )
    data: Data = section(Data)
    # The shapes in a checkpoint and the weights that training started from depend on these.
    model: Model = section(Model, fixed_on_resume=True)
    actor: Actor = section(Actor, read_by=PPO)
    critic: Critic = section(Critic, read_by=PPO)
    reference: Reference = section(Reference, read_by=PPO)
    algorithm: Algorithm = section(Algorithm, read_by=PPO)
    rollout: RolloutOptions = section(RolloutOptions, read_by=PPO)
    reward: Reward = section(Reward, read_by=PPO)
    supervised: Supervised = section(Supervised, read_by=SUPERVISED)
    packing: Packing = section(Packing)
    mesh: MeshShape = section(MeshShape)
    distributed: Distributed = section(Distributed)
    trainer: Trainer = section(Trainer)

    @property
    def has_critic(self) -> bool:
        """Return whether the advantages need a critic; otherwise none is built or stored."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def shares_trunk(self) -> bool:
        """Return whether the critic is a head on the actor's trunk."""
        return self.has_critic and self.critic.shared_trunk

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained; their frozen base is kept as the reference."""
        return bool(self.model.lora.rank or self.model.lora.path)

    @property
    def keeps_reference(self) -> bool:
        """Return whether the train state holds the parameters of a reference."""
        return self.algorithm.use_reference or self.has_adapters

    @property
    def whitens_advantages(self) -> bool:
        """Return algorithm.whiten_advantages or, if unset, the choice of the estimator's paper."""
        if self.algorithm.whiten_advantages is not None:
            return self.algorithm.whiten_advantages
        whitening = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        return self.algorithm.adv_estimator in whitening

    @property
    def responses_per_prompt(self) -> int:
        """Return the number of responses to each prompt that the update learns from."""
        return self.rollout.keep or self.rollout.n

    @property
    def selects_samples(self) -> bool:
        """Return whether rewards decide which of the samples the update learns from."""
        return self.algorithm.filter_groups.enable or self.rollout.keep is not None

    @property
    def has_step_rewards(self) -> bool:
        """Return whether rewards are earned within responses, and not only by whole ones."""
        return self.reward.process_rewards or bool(self.rollout.multi_turn.environment)

    @property
    def rewards_by_environment_alone(self) -> bool:
        """Return whether an environment's rewards are the only ones."""
        turns = self.rollout.multi_turn
        return bool(turns.environment) and turns.reward == "environment"

    @property
    def updates_once(self) -> bool:
        """Return whether a rollout is used for a single optimizer step.

        If so, the policy that is trained is still the policy that was scored.
        """
        one_epoch = self.actor.ppo_epochs == 1
        return one_epoch and self.actor.ppo_mini_batch_size == self.data.train_batch_size

    @property
    def sequence_length(self) -> int:
        """Return the number of tokens of the longest prompt and response together, S."""
        return self.data.max_prompt_length + self.data.max_response_length


@functools.cache
def all_options() -> tuple[Option, ...]:
    """Return every option, in the schema's order."""
    return tuple(iterate_options(Config))


def option_value(config: Config, name: str) -> object:
    """Return the value of the option with this dotted name."""
    return functools.reduce(getattr, name.split("."), config)
