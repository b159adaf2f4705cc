"""The schema: every option with its default, unit, range and meaning. `python -m jax_ppo.config` prints it as a table.

Names are verl's where the thing is the same: batch and mini-batch sizes count prompts, frequencies count steps.
"""

import dataclasses
import typing

VERL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}


def option(
    default, doc, *, choices=None, aliases=None, at_least=None, above=None, at_most=None, below=None
):
    """A field with its meaning and range. `None` as a value passes the range: it means "not set".

    `aliases`: other names of some choices, by which the choice is meant.
    """
    limits = {
        "choices": choices,
        "aliases": aliases or {},
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
    }
    return dataclasses.field(default=default, metadata={"doc": doc, **limits})


def section(cls):
    return dataclasses.field(default_factory=cls)


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POLICY_LOSSES = ("vanilla", "importance", "gspo", "gmpo", "cispo", "reinforce")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclasses.dataclass(frozen=True)
class Data:
    train_files: str = option(
        "",
        "training data: files (.jsonl, .jsonl.gz, .parquet), `arithmetic:COUNT`, `stories:COUNT`, "
        "`hf:OWNER/NAME/FILE` or `tfds:NAME/SPLIT`; several separated by commas; FILE[START:END] is some "
        "of a file's rows",
    )
    val_files: str = option("", "held-out data, named the same way; empty turns evaluation off")
    train_batch_size: int = option(64, "prompts a step", at_least=1)
    val_batch_size: int = option(256, "prompts sampled at a time in an evaluation", at_least=1)
    val_max_samples: int | None = option(
        None,
        "held-out prompts used, from the files' start, overlong ones counted; unset: all",
        at_least=1,
    )
    max_prompt_length: int = option(
        512, "tokens; longer prompts are dropped, cut or refused", at_least=1
    )
    max_response_length: int = option(512, "tokens sampled at most", at_least=1)
    filter_overlong_prompts: bool = option(
        True, "drop prompts longer than max_prompt_length, saying how many"
    )
    truncation: str = option(
        "error",
        "what to do with an overlong prompt that was not dropped",
        choices=("error", "left", "right", "middle"),
    )
    prompt_key: str = option(
        "prompt", "column of the prompt in rows of verl's form (text, or a list of messages)"
    )
    instruction: str = option(
        "", "text added after the question in rows of GSM8K's form, with a blank before it"
    )
    chat_template: bool = option(True, "apply the tokenizer's chat template where it has one")
    shuffle: bool = option(True, "a fresh order each epoch, from `seed`")


@dataclasses.dataclass(frozen=True)
class Create:
    vocab_size: int = option(
        256, "tokens of the tokenizer that is trained on the data, at most", at_least=32
    )
    hidden_size: int = option(128, "width", at_least=8)
    intermediate_size: int = option(352, "width of the MLP", at_least=8)
    num_layers: int = option(2, "layers", at_least=1)
    num_heads: int = option(4, "query heads", at_least=1)
    num_kv_heads: int = option(2, "key and value heads", at_least=1)
    steps: int = option(
        500, "supervised steps on examples that are all solved step by step", at_least=1
    )
    habit_steps: int = option(
        50, "supervised steps after those, on examples of which careful_share are", at_least=1
    )
    batch_size: int = option(32, "worked examples a supervised step", at_least=1)
    lr: float = option(2e-3, "peak learning rate of the supervised steps", above=0)
    habit_lr: float = option(3e-4, "their peak learning rate", above=0)
    careful_share: float = option(
        0.25, "share of the later examples that are solved step by step", at_least=0, at_most=1
    )


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = option(
        0,
        "of the adapters that actor and critic learn instead of all parameters, beside one frozen base that "
        "is the reference too; 0: everything is learned",
        at_least=0,
    )
    alpha: float = option(16.0, "the adapters' product counts alpha / rank times", above=0)
    targets: str = option(
        "all-linear",
        "projections that have adapters, separated by commas: "
        + ", ".join(LORA_TARGETS)
        + "; all-linear: all of them",
    )
    path: str = option(
        "",
        "folder or hub name of adapters in PEFT's format that the actor starts from; their rank, alpha and "
        "targets hold then",
    )


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = option(
        "",
        "Hugging Face folder or hub name (OWNER/NAME, or OWNER/NAME@REVISION, as everywhere); empty makes a "
        "small model (see model.create)",
    )
    tokenizer_path: str = option("", "folder or hub name of the tokenizer; empty is model.path")
    dtype: str = option(
        "bfloat16",
        "type of the computation; trained parameters and their optimizer are kept in float32",
        choices=("bfloat16", "float32"),
    )
    gradient_checkpointing: bool = option(
        True, "recompute each layer's activations in the backward pass"
    )
    attention: str = option(
        "auto",
        "program for whole sequences: xla runs everywhere; cudnn on NVIDIA in bfloat16; splash on "
        "TPU where packing.row_length is a multiple of 128; auto: the platform's own where it can run",
        choices=("auto", "xla", "cudnn", "splash"),
    )
    lora: Lora = section(Lora)
    create: Create = section(Create)


@dataclasses.dataclass(frozen=True)
class Optim:
    lr: float = option(1e-6, "peak learning rate", above=0)
    lr_warmup_steps: int = option(
        0, "steps of linear warm-up, counted in steps that train this model", at_least=0
    )
    lr_schedule: str = option(
        "constant",
        "after the warm-up, until the last step",
        choices=("constant", "linear", "cosine"),
    )
    min_lr_ratio: float = option(
        0.0, "share of lr left at the end of linear and cosine", at_least=0, at_most=1
    )
    beta1: float = option(0.9, "AdamW", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW", above=0)
    weight_decay: float = option(
        0.01, "AdamW, on matrices alone (not on norms and biases)", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class CriticOptim(Optim):
    lr: float = option(1e-5, "peak learning rate", above=0)


@dataclasses.dataclass(frozen=True)
class Actor:
    optim: Optim = section(Optim)
    grad_clip: float = option(1.0, "largest global gradient norm", above=0)
    ppo_mini_batch_size: int = option(
        64, "prompts an optimizer step, each with its rollout.n responses", at_least=1
    )
    ppo_micro_batch_size_per_device: int | None = option(
        None,
        "packed rows a device takes at once; unset: a sixteenth of the samples, up to a quarter for 1,024 tokens; 8,192 "
        "tokens at most",
        at_least=1,
    )
    ppo_epochs: int = option(1, "passes over one rollout, freshly shuffled each time", at_least=1)
    clip_ratio: float = option(
        0.2, "the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]", above=0, below=1
    )
    clip_ratio_low: float | None = option(
        None, "lower side alone; unset: clip_ratio", above=0, below=1
    )
    clip_ratio_high: float | None = option(None, "upper side alone; unset: clip_ratio", above=0)
    clip_ratio_c: float | None = option(
        3.0, "dual clip's constant for negative advantages; 0 turns it off", at_least=0
    )
    policy_loss: str = option(
        "vanilla",
        "vanilla (PPO's clip), importance (unclipped ratio), gspo (sequence's ratio), gmpo, "
        "cispo, reinforce (no ratio), or one of your own: `module:function` or `file.py:function`, "
        "called as kernels/policy_losses.py describes",
    )
    entropy_coeff: float = option(0.0, "weight of the entropy bonus", at_least=0)
    entropy_schedule: str = option(
        "",
        "that weight as STEP:WEIGHT points joined by lines, `0:0.01,200:0`; empty: "
        "entropy_coeff throughout",
    )
    use_kl_loss: bool = option(False, "add the KL to the reference to the actor's loss")
    kl_loss_coef: float = option(0.001, "weight of that KL", at_least=0)
    kl_loss_ctrl: bool = option(
        False,
        "weigh it by the coefficient of algorithm.kl_ctrl, as that moves, instead of kl_loss_coef",
    )
    kl_loss_type: str = option(
        "k3",
        "its estimator; k1 restrains nothing here; k3+ has the value of k3 and the gradient of "
        "k2; full sums over the vocabulary, for another pass of the reference in each micro-batch",
        choices=("k1", "abs", "k2", "k3", "k3+", "clamped", "full"),
        aliases=VERL_KINDS,
    )
    target_kl: float | None = option(
        None,
        "once a mini-batch's approximate KL to the policy that the step began with passes "
        "1.5 times this, the actor takes no more of the step's mini-batches; unset: never",
        above=0,
    )
    loss_agg_mode: str = option(
        "token-mean", "how token losses of a mini-batch are averaged", choices=AGGREGATIONS
    )
    loss_scale_factor: int | None = option(
        None,
        "tokens that seq-mean-token-sum-norm divides by; unset: data.max_response_length",
        at_least=1,
    )


@dataclasses.dataclass(frozen=True)
class Critic:
    path: str = option(
        "",
        "folder or hub name the critic starts from; empty is model.path. With model.lora: adapters in "
        "PEFT's format on model.path's weights",
    )
    keep_head: bool = option(
        False,
        "the critic starts with the scalar head that critic.path has, such as a reward model's; "
        "off: with one of zeros",
    )
    shared_trunk: bool = option(
        False,
        "the critic is no model of its own but a scalar head on the actor's: one forward and "
        "backward pass serves both losses, whose sum (with value_loss_coef) is the actor's to descend; "
        "the head learns at actor.optim.lr, and stops with actor.target_kl",
    )
    optim: CriticOptim = section(CriticOptim)
    grad_clip: float = option(1.0, "largest global gradient norm", above=0)
    ppo_mini_batch_size: int | None = option(None, "as the actor's; unset: the actor's", at_least=1)
    ppo_micro_batch_size_per_device: int | None = option(
        None, "as the actor's; unset: the actor's", at_least=1
    )
    ppo_epochs: int | None = option(None, "as the actor's; unset: the actor's", at_least=1)
    loss_agg_mode: str | None = option(
        None, "as the actor's; unset: the actor's", choices=AGGREGATIONS
    )
    cliprange_value: float | None = option(
        0.5, "how far a new value may move from the old one in the loss; 0 turns it off", at_least=0
    )
    value_loss_coef: float = option(
        1.0,
        "weight of the value loss (it scales what is reported, and the gradient's norm)",
        above=0,
    )
    huber_delta: float | None = option(
        None,
        "error from which on the loss grows linearly (Huber's), in units of reward, or of "
        "deviations with normalize_values; unset: squared",
        above=0,
    )
    normalize_values: bool = option(
        False,
        "the critic learns returns normalised by their running mean and deviation; "
        "cliprange_value counts in deviations then",
    )


@dataclasses.dataclass(frozen=True)
class KLControl:
    type: str = option(
        "fixed",
        "fixed; adaptive towards target_kl; or by `schedule`: linear joins its points by lines, step "
        "holds each until the next",
        choices=("fixed", "adaptive", "linear", "step"),
    )
    kl_coef: float = option(0.001, "coefficient (the first one, if adaptive)", at_least=0)
    schedule: str = option("", "STEP:COEFFICIENT points of linear and step, `0:0.05,100:0.01`")
    target_kl: float = option(0.1, "KL that the adaptive controller holds, in target_unit", above=0)
    target_unit: str = option(
        "token",
        "token: mean KL a token (verl); sequence: KL summed over a response, mean over "
        "responses (OpenAI's 6)",
        choices=("token", "sequence"),
    )
    horizon: int = option(10_000, "samples over which the adaptive controller acts", at_least=1)
    error_clip: float = option(0.2, "largest relative error that it acts on", above=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    adv_estimator: str = option(
        "gae",
        "gae; or without a critic: grpo, rloo and reinforce_plus_plus_baseline (against a "
        "prompt's other responses), reinforce_plus_plus (discounted reward to go)",
        choices=("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    )
    gamma: float = option(1.0, "discount a token", at_least=0, at_most=1)
    lam: float = option(1.0, "GAE's lambda", at_least=0, at_most=1)
    critic_gamma: float | None = option(
        None, "gamma of the returns that the critic learns; unset: gamma", at_least=0, at_most=1
    )
    critic_lam: float | None = option(
        None, "lambda of the returns that the critic learns; unset: lam", at_least=0, at_most=1
    )
    lam_length_alpha: float | None = option(
        None,
        "lambda of the advantages is 1 - 1 / (this x response length), VAPO's 0.05; unset: lam",
        above=0,
    )
    bootstrap_truncated: bool = option(
        False, "the value after a response that was cut off is the critic's, instead of 0"
    )
    mask_truncated: bool = option(
        False,
        "losses leave out responses that were cut off; other responses' baselines, whitened "
        "rewards and running moments still know their scores",
    )
    norm_adv_by_std_in_grpo: bool = option(
        True, "grpo divides by the deviation of a prompt's rewards; off: Dr. GRPO"
    )
    whiten_rewards: bool = option(
        False, "token rewards to variance 1 over the whole rollout, their mean kept"
    )
    whiten_advantages: bool | None = option(
        None,
        "advantages to variance 1 over the whole rollout; unset: with gae and "
        "the two of reinforce_plus_plus",
    )
    whiten_shift_mean: bool = option(
        True, "whitened advantages have mean 0; off: they keep their mean"
    )
    use_kl_in_reward: bool = option(
        False, "subtract kl_ctrl's coefficient times the KL estimate from each token's reward"
    )
    use_reference: bool = option(
        True,
        "keep the first policy frozen (with model.lora the base without adapters) and measure "
        "the KL to it at each step",
    )
    kl_penalty: str = option(
        "k1",
        "that estimate; full sums over the vocabulary. In the reward k1 alone follows the KL's "
        "gradient (kernels/kl.py)",
        choices=("k1", "abs", "k2", "k3", "clamped", "full"),
        aliases=VERL_KINDS,
    )
    kl_ctrl: KLControl = section(KLControl)
    rollout_is: str = option(
        "none",
        "importance weights of the policy loss (not of KL and returns), for tokens drawn by "
        "older weights (rollout.one_step_off) or by the sampler's rounding: of each token, or of the "
        "whole sequence",
        choices=("none", "token", "sequence"),
    )
    rollout_is_threshold: float = option(2.0, "what those weights are cut off at", at_least=1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float = option(0.0, "0 is greedy", at_least=0)
    top_k: int = option(-1, "draw among the k likeliest tokens; -1 among all", at_least=-1)
    top_p: float = option(
        1.0, "draw among the likeliest tokens that hold this probability", above=0, at_most=1
    )
    n: int = option(1, "responses a prompt", at_least=1)


@dataclasses.dataclass(frozen=True)
class RolloutOptions(Sampling):
    temperature: float = option(
        1.0, "divides the logits, in sampling and in every scoring pass", above=0
    )
    max_num_seqs: int = option(
        256,
        "samples a device decodes at once; the others wait, and take the place of one that has "
        "ended",
        at_least=1,
    )
    attention: str = option(
        "auto",
        "program that reads the cache: xla runs everywhere; cudnn, where model.attention is cudnn "
        "too, reads each sequence up to its end, but no sliding window; auto: cudnn where it can run",
        choices=("auto", "xla", "cudnn"),
    )
    logprob_micro_batch_size_per_device: int | None = option(
        None, "packed rows a device scores at once; unset: as for the actor", at_least=1
    )
    reuse_logprobs: str = option(
        "auto",
        "take the sampler's log-probs for the old policy's instead of computing them again: `always`, where the first "
        "ratios are off 1 by what two programs round differently (percents in bfloat16); `never`; `auto`: where that biases "
        "nothing, in float32 on CPU and, without a KL in the reward or an adaptive one, in a step of one optimizer step",
        choices=("auto", "always", "never"),
    )
    one_step_off: bool = option(
        False,
        "sample the next batch before a step's update instead of after it, while the host "
        "counts the step's rewards; needs algorithm.rollout_is. Before a checkpoint that is due it "
        "waits, so that a resumed run is the same; after one that a signal asked for it is not",
    )
    val_kwargs: Sampling = section(Sampling)


@dataclasses.dataclass(frozen=True)
class Reward:
    function: str = option(
        "",
        "`module:function` called as f(data_source, solution_str, ground_truth, extra_info); empty: the "
        "built-in rule of each row's data_source",
    )
    gsm8k_method: str = option(
        "strict",
        "strict wants `#### N`; flexible takes the last number",
        choices=("strict", "flexible"),
    )
    fallback_score: float = option(0.0, "score of a sample whose rule raised an error")
    model_path: str = option(
        "",
        "folder or hub name of a reward model (sequence classification with one label: a decoder, or "
        "DeBERTa-v2 or v3); its score is added to reward.function's, or is the reward where that is empty",
    )
    model_input: str = option(
        "auto",
        "what it reads, in tokens of its own: chat (its own chat template), pair (the prompt and "
        "the response), text (one behind the other); auto: pair of an encoder; of a decoder the sampled "
        "tokens as they are, where it has the actor's vocabulary and no other chat template, else chat "
        "where there is a template, else text",
        choices=("auto", "chat", "pair", "text"),
    )
    max_length: int | None = option(
        None,
        "tokens that it reads at most, in tokens of its own; longer inputs lose the start of "
        "their prompts; unset: what its config.json gives",
        at_least=16,
    )
    micro_batch_size_per_device: int | None = option(
        None,
        "packed rows of its own tokens that a device scores at once; unset: as for the actor",
        at_least=1,
    )
    process_rewards: bool = option(
        False,
        "reward.function's dict may hold `step_rewards`, a list of (characters of the "
        "response up to the step's end, reward): each is earned by the token that reaches it, "
        "whatever normalises or clips scores; estimators that compare responses take their sum",
    )
    normalize: str = option(
        "none",
        "divide scores by their deviation: running, over all so far; reference, over "
        "normalize_samples of the first policy, measured before the first step",
        choices=("none", "running", "reference"),
    )
    normalize_shift: bool = option(True, "normalised scores lose their mean too")
    normalize_samples: int = option(
        256, "responses that reference measures, rounded up to whole batches", at_least=2
    )
    clip: float | None = option(
        None, "scores, normalised if asked, are clipped to +- this; unset: not", above=0
    )
    missing_eos_penalty: float = option(
        0.0, "taken from the score of a response that was cut off", at_least=0
    )
    overlong_buffer_len: int = option(
        0,
        "last tokens of max_response_length over which overlong_penalty_factor builds up "
        "(DAPO); 0: no penalty",
        at_least=0,
    )
    overlong_penalty_factor: float = option(
        1.0, "taken from the score at max_response_length", at_least=0
    )
    length_penalty: float = option(
        0.0, "taken from the score for each token of the response", at_least=0
    )


@dataclasses.dataclass(frozen=True)
class Supervised:
    """Of `python -m jax_ppo.sft` and `python -m jax_ppo.reward_model`, which PPO does not read."""

    optim: CriticOptim = section(CriticOptim)
    grad_clip: float = option(1.0, "largest global gradient norm", above=0)
    micro_batch_size_per_device: int | None = option(
        None,
        "packed rows a device takes at once; unset: a sixteenth of the batch, up to a quarter for 1,024 tokens; 8,192 "
        "tokens at most",
        at_least=1,
    )
    response_key: str = option(
        "answer", "what sft learns of rows of verl's form: a column, or a name in extra_info"
    )
    center_coef: float = option(
        0.0,
        "reward_model: weight of the squared sum of a pair's scores, which draws their mean to 0",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True)
class Packed:
    enabled: bool = option(True, "several samples in a row; off: one sample a row, padded")
    row_length: int | None = option(
        None,
        "tokens of a row; unset: max_prompt_length + max_response_length, in supervised "
        "training as many as the longest example has, or somewhat more",
        at_least=2,
    )


@dataclasses.dataclass(frozen=True)
class MeshShape:
    data: int = option(
        -1,
        "replicas of the parameters; -1 takes the devices that the other axes leave",
        at_least=-1,
    )
    fsdp: int = option(
        1, "devices that share one copy of parameters and optimizer; -1 as for data", at_least=-1
    )
    model: int = option(1, "devices that split each matrix (tensor parallelism)", at_least=1)


@dataclasses.dataclass(frozen=True)
class Distributed:
    coordinator_address: str = option(
        "", "host:port of process 0; empty: a TPU pod or Slurm tells, or there is one process"
    )
    num_processes: int = option(0, "processes, with coordinator_address", at_least=0)
    process_id: int = option(-1, "this process, from 0, with coordinator_address", at_least=-1)
    heartbeat_seconds: int = option(
        30, "a process silent for so long is taken for dead", at_least=10
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    total_epochs: int = option(1, "passes over the training data", at_least=1)
    total_training_steps: int | None = option(
        None, "steps in all; unset: as many as total_epochs give", at_least=1
    )
    critic_warmup: int = option(0, "first steps, in which only the critic learns", at_least=0)
    test_freq: int = option(10, "steps between evaluations; 0: only the last step", at_least=0)
    val_before_train: bool = option(True, "evaluate before the first step")
    save_freq: int = option(50, "steps between checkpoints; 0: only the last step", at_least=0)
    max_checkpoints: int = option(2, "newest checkpoints kept, besides the best one", at_least=1)
    best_metric: str = option(
        "accuracy",
        "what the best checkpoint is chosen by, among steps both evaluated and saved",
        choices=("accuracy", "reward_mean"),
    )
    resume: bool = option(True, "go on from the newest checkpoint of the work directory")
    export: bool = option(
        True,
        "write what was trained as a Hugging Face folder at the end (WORKDIR/actor, or reward_model), "
        "and adapters in PEFT's format too (WORKDIR/adapter)",
    )
    warn_entropy_below: float = option(
        0.005, "warn when the mean entropy, nats a token, falls below; 0: never", at_least=0
    )
    warn_kl_above: float = option(
        1.0,
        "warn when the mean KL to the reference, nats a token, rises above; 0: never",
        at_least=0,
    )
    max_skipped_updates: int = option(
        10, "stop after so many steps in a row with a non-finite gradient", at_least=1
    )
    log_samples: int = option(3, "responses shown at each evaluation", at_least=0)
    compilation_cache: str = option(
        "",
        "folder in which compiled programs are kept for later runs; `off` keeps none; empty: "
        "JAX_COMPILATION_CACHE_DIR if set, else jax_ppo/compiled in the user's cache folder",
    )
    logger: str = option(
        "tensorboard", "curves besides the CSV: tensorboard, wandb, both with a comma, or empty"
    )


@dataclasses.dataclass(frozen=True)
class Config:
    experiment_name: str = option("ppo", "names the work directory output/NAME")
    seed: int = option(0, "of everything random", at_least=0)
    data: Data = section(Data)
    model: Model = section(Model)
    actor: Actor = section(Actor)
    critic: Critic = section(Critic)
    algorithm: Algorithm = section(Algorithm)
    rollout: RolloutOptions = section(RolloutOptions)
    reward: Reward = section(Reward)
    supervised: Supervised = section(Supervised)
    packing: Packed = section(Packed)
    mesh: MeshShape = section(MeshShape)
    distributed: Distributed = section(Distributed)
    trainer: Trainer = section(Trainer)

    @property
    def row_length(self) -> int:
        """Tokens of a packed row, L."""
        return self.packing.row_length or self.sequence_length

    @property
    def has_critic(self) -> bool:
        """Whether advantages need a critic; without one none is built or stored."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head of the actor's."""
        return self.has_critic and self.critic.shared_trunk

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are learned (model.lora); the frozen base that they stand on is kept as the reference."""
        return bool(self.model.lora.rank or self.model.lora.path)

    @property
    def keeps_reference(self) -> bool:
        """Whether the state holds one."""
        return self.algorithm.use_reference or self.has_adapters

    @property
    def whitens_advantages(self) -> bool:
        """Unless algorithm.whiten_advantages says so, as the estimator's authors do."""
        of_authors = self.algorithm.adv_estimator in (
            "gae",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
        return (
            of_authors
            if self.algorithm.whiten_advantages is None
            else self.algorithm.whiten_advantages
        )

    @property
    def updates_once(self) -> bool:
        """One optimizer step a rollout: the policy that is trained is still the one that was scored."""
        return (
            self.actor.ppo_epochs == 1
            and self.actor.ppo_mini_batch_size == self.data.train_batch_size
        )

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest prompt with the longest response, S."""
        return self.data.max_prompt_length + self.data.max_response_length


def options(cls=Config, prefix=""):
    """Yields (dotted name, type, default, doc) of every option; the type of `float | None` is float."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from options(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, plain_type(field.type), field.default, field.metadata["doc"]


def plain_type(annotation):
    """float for `float | None`."""
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    return arguments[0] if arguments else annotation
