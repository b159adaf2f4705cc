"""What the PPO examples of verl, TRL and OpenRLHF set is translated, or left out for a reason.

What is translated trains here. The options come from verl's scripts for Megatron, of the scripts
`ppo.py` and `ppo_tldr.py` of TRL, and of OpenRLHF's scripts `train_ppo_*`, with names before and
since its version 0.11.
"""

import dataclasses
import json
import re
import shlex

import jax
import pytest

import tiny
from jax_ppo.config import command_line
from jax_ppo.config.loading import load_config
from jax_ppo.config.schema import flatten_options
from jax_ppo.migrating.translation import translate
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.train import main
from llama_folder import write_llama

MEGATRON = """python3 -m verl.trainer.main_ppo --config-path=./config
    --config-name='ppo_megatron_trainer' algorithm.adv_estimator=gae
    data.train_files="['a.parquet', 'b.parquet']" data.val_files=c.parquet
    data.train_batch_size=512 data.max_prompt_length=300 data.max_response_length=200
    data.filter_overlong_prompts=True data.truncation='error' data.trust_remote_code=True
    actor_rollout_ref.model.path=m actor_rollout_ref.model.trust_remote_code=True
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000
    actor_rollout_ref.actor.entropy_coeff=0.1
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=False
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.grad_offload=False
   
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=3
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1000
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1000
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=8
    actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.ref.megatron.param_offload=True
    critic.model.path=m critic.model.trust_remote_code=True critic.model.use_remove_padding=True
    critic.model.enable_gradient_checkpointing=False critic.optim.lr=3e-5
    critic.ppo_micro_batch_size_per_gpu=2 critic.use_dynamic_bsz=True
    critic.ppo_max_token_len_per_gpu=1000 critic.megatron.tensor_model_parallel_size=2
    critic.megatron.pipeline_model_parallel_size=4 critic.megatron.expert_model_parallel_size=8
    critic.megatron.expert_tensor_parallel_size=1 critic.megatron.param_offload=False
    critic.megatron.optimizer_offload=True critic.megatron.grad_offload=False
    algorithm.use_kl_in_reward=False trainer.balance_batch=True trainer.critic_warmup=0
    trainer.logger='["console","wandb"]' trainer.project_name=p trainer.experiment_name=e
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=7
    trainer.val_before_train=False trainer.total_epochs=3 model_engine=megatron"""
TRL = """accelerate launch --config_file examples/deepspeed_zero3.yaml
    examples/scripts/ppo/ppo_tldr.py --dataset_name d --dataset_train_split train
    --dataset_test_split validation
    --output_dir out --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 4e-6
    --per_device_train_batch_size 8
    --gradient_accumulation_steps 4 --total_episodes 1000 --model_name_or_path base
    --sft_model_path tuned --reward_model_path judge --local_rollout_forward_batch_size 5
    --missing_eos_penalty 1.5 --stop_token eos --response_length 40 --eval_strategy steps
    --eval_steps 30"""
OPENRLHF_BEFORE = """ray job submit --address=http://localhost:1
    --runtime-env-json='{"working_dir": "x"}' -- python3 -m openrlhf.cli.train_ppo_ray
    --ref_num_nodes 1 --ref_num_gpus_per_node 8
    --reward_num_nodes 1 --reward_num_gpus_per_node 8 --critic_num_nodes 1
    --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8
    --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5
    --vllm_sync_backend nccl --vllm_enable_sleep --deepspeed_enable_sleep --enforce_eager
    --colocate_all_models --colocate_critic_reward --colocate_actor_ref --pretrain m
    --reward_pretrain r --save_path out --ckpt_path ckpt --save_hf_ckpt --load_checkpoint
    --max_ckpt_num 2 --save_steps 10 --eval_steps -1 --logging_steps 1 --train_batch_size 96
    --micro_train_batch_size 2 --rollout_batch_size 48 --micro_rollout_batch_size 4
    --n_samples_per_prompt 4 --max_epochs 2 --num_episodes 1 --max_samples 5000 --prompt_max_len 100
    --generate_max_len 200 --zero_stage 3 --bf16 --param_dtype bf16 --adam_offload --flash_attn
    --ref_reward_offload --gradient_checkpointing --packing_samples --use_dynamic_batch
    --train_max_tokens_per_gpu 1000 --ring_head_stride 2 --actor_learning_rate 6e-7
    --critic_learning_rate 8e-6 --init_kl_coef 0.02 --use_kl_estimator_k3 --normalize_reward
    --prompt_data d --input_key messages --label_key label --apply_chat_template
    --enable_vllm_is_correction --agent_func_path a.py --dynamic_filtering_reward_range 0.0 1.0
    --use_tensorboard runs --use_wandb {key}"""
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 2
    --critic.num_nodes 1 --critic.num_gpus_per_node 2 --actor.num_nodes 1
    --actor.num_gpus_per_node 2 --reward.num_nodes 1 --reward.num_gpus_per_node 2
    --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --vllm.gpu_memory_utilization 0.5
    --vllm.sync_backend nccl --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep
    --train.colocate_all --train.colocate_actor_ref --train.colocate_critic_reward
    --actor.model_name_or_path m --reward.remote_url f.py --ckpt.output_dir out --ckpt.path ckpt
    --ckpt.save_hf --train.micro_batch_size 2 --train.batch_size 32 --rollout.micro_batch_size 4
    --rollout.batch_size 64 --rollout.n_samples_per_prompt 2 --data.max_samples 5000
    --train.max_epochs 1 --data.max_len 300 --fsdp.param_dtype bf16 --ds.zero_stage 3
    --ds.adam_offload --ds.packing_samples --ds.ring_attn_head_stride 2 --actor.adam.lr 6e-7
    --critic.adam.lr 8e-6 --algo.kl.init_coef 0.02 --algo.kl.use_loss --algo.kl.estimator k2
    --data.prompt_dataset d --data.input_key messages --data.apply_chat_template
    --reward.normalize_enable --fsdp.attn_implementation flash_attention_2
    --actor.gradient_checkpointing_enable --train.dynamic_batch_enable
    --train.max_tokens_per_gpu 1000 --logger.wandb.key {key}"""
# verl's published PPO on GSM8K (0.567): the settings that its log prints, without the machine.
PUBLISHED = """python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=512
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_epochs=1
    actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.entropy_coeff=0.001
    actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.optim.betas=[0.9,0.999]
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.optim.weight_decay=0.01 actor_rollout_ref.rollout.temperature=1.0
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.optim.lr=1e-5 critic.cliprange_value=0.5
    critic.grad_clip=1.0 critic.optim.betas=[0.9,0.999] critic.optim.weight_decay=0.01
    algorithm.adv_estimator=gae algorithm.gamma=1.0 algorithm.lam=1.0 algorithm.kl_penalty=kl
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001
    trainer.critic_warmup=0 trainer.test_freq=10 trainer.total_epochs=15"""
# Forms of verl's examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh and
# examples/ppo_trainer/run_qwen2-7b_rm.sh, and of TRL's commands with adapters.
GRPO_LORA = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation=error data.shuffle=False
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.model.use_shm=True
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.actor.optim.lr=3e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.load_format=safetensors
    actor_rollout_ref.rollout.layered_summon=True algorithm.use_kl_in_reward=False
    trainer.logger='["console","wandb"]' trainer.total_epochs=15"""
REWARD_MODEL = """train_files="['$HOME/data/gsm8k/train.parquet']"
    python3 -m verl.trainer.main_ppo data.train_files="$train_files" data.train_batch_size=1024
    data.return_raw_chat=True actor_rollout_ref.model.path=$HOME/models/policy
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.05
    critic.model.path=$HOME/models/policy reward_model.enable=True
    reward_model.model.path=$HOME/models/judge reward_model.model.use_remove_padding=True
    reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size_per_gpu=32
    trainer.total_training_steps=435 trainer.nnodes=1"""
TRL_LORA = """accelerate launch examples/scripts/ppo/ppo.py --dataset_name a/b
    --num_ppo_epochs 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 16
    --total_episodes 10000 --warmup_ratio 0.1 --sft_model_path tuned --reward_model_path judge
    --use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules q_proj v_proj"""
TRL_GRPO = """trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/DeepMath-103K
    --reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.5
    --per_device_train_batch_size 8
    --gradient_accumulation_steps 2 --num_generations 8 --max_steps 200 --warmup_ratio 0.05
    --importance_sampling_level token --use_peft --output_dir out"""
COMMANDS = {
    "verl's GRPO with adapters": ("verl", GRPO_LORA),
    "verl with a reward model": ("verl", REWARD_MODEL),
    "TRL with adapters": ("trl", TRL_LORA),
    "TRL's GRPO": ("trl", TRL_GRPO),
    "verl": ("verl", PUBLISHED),
    "Megatron": ("verl", MEGATRON),
    "TRL": ("trl", TRL),
    "OpenRLHF before": ("openrlhf", OPENRLHF_BEFORE),
    "OpenRLHF": ("openrlhf", OPENRLHF),
}


# Machines, models and data are replaced by small ones, and nothing else but the logger.
SIZES = {
    "data.train_batch_size": 8,
    "data.val_batch_size": 8,
    "data.val_max_samples": 8,
    "data.max_prompt_length": 16,
    "data.max_response_length": 4,
    "actor.ppo_mini_batch_size": 4,
    "packing.row_length": 40,
    "mesh.model": 1,
    "mesh.stage": 1,
    "mesh.expert": 1,
    "rollout.mesh.model": 1,
    "trainer.total_training_steps": 1,
    "trainer.logger": "console",
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_translated_or_has_a_reason_and_the_command_is_accepted(name):
    framework, text = COMMANDS[name]
    translated = translate(framework, text)
    assert not [note for note in translated.notes if "there is no such option" in note]
    # Nothing was refused, and changed.
    assert not [note for note in translated.notes if "changed to" in note or "refuses" in note]
    words = shlex.split(translated.command().replace("\\\n", ""))
    config, _ = command_line.read_command_line(["train", *words[3:]])
    assert re.search(rf"[ =]{re.escape(config.model.path)}\s", text)


def test_verls_published_run_is_the_shipped_configuration():
    translated = translate("verl", PUBLISHED)
    assert translated.notes == []
    words = shlex.split(translated.command().replace("\\\n", ""))
    theirs, ours = (
        flatten_options(dataclasses.asdict(config))
        for config in (
            command_line.read_command_line(["train", *words[3:]])[0],
            load_config("verl_gsm8k"),
        )
    )
    assert {name for name in ours if ours[name] != theirs[name]} == {
        *("experiment_name", "trainer.save_freq", "data.train_files", "data.val_files"),
        # Prepared files have the instruction in them, and verl filtered prompts then.
        *("data.instruction", "data.filter_overlong_prompts"),
        # Without a dual clip; the first `#### ` counts.
        *("actor.clip_ratio_c", "reward.terms"),
    }
    assert (ours["actor.clip_ratio_c"], ours["reward.terms"]) == (0, "gsm8k[first]:1")


def test_a_critic_of_adapters_starts_with_a_new_head_instead_of_the_reward_model():
    """Adapters have one base: hh_rlhf's critic.path and TRL's value model are other weights."""
    translated = translate("trl", TRL_LORA)
    assert "--config.critic.path=''" in translated.command()
    assert any(x.startswith("config.critic.path='': adapters share") for x in translated.notes)
    without_judge = translate("trl", "python ppo.py --use_peft --sft_model_path m")
    assert "--config.critic.path=''" in without_judge.command()
    same = translate("verl", f"{PUBLISHED} actor_rollout_ref.model.lora_rank=8")
    assert same.options["critic.path"] == "" and "critic" not in " ".join(same.notes)


def test_a_reward_model_of_verl_needs_no_further_option():
    """435 steps: a tenth of them are 43.5, a twentieth 21.75."""
    translated = translate("verl", REWARD_MODEL)
    assert translated.notes == []
    options = translated.options
    assert options["reward.model_path"] == "$HOME/models/judge"
    assert options["reward.param_offload"] == "true"
    assert options["actor.optim.lr_warmup_steps"] == "44"
    assert options["critic.optim.lr_warmup_steps"] == "22"
    # Rows of a model with the policy's tokenizer have no size of their own.
    assert "reward.micro_batch_size_per_device" not in options
    epochs = translate("verl", REWARD_MODEL.replace("total_training_steps", "total_epochs"))
    assert epochs.notes == [
        "config.actor.optim.lr_warmup_steps=0: set it to 0.1 of the steps of the run",
        "config.critic.optim.lr_warmup_steps=0: set it to 0.05 of the steps of the run",
    ]


def test_trls_reward_functions_become_terms():
    options = translate("trl", TRL_GRPO).options
    assert options["reward.terms"] == "math:1.0,format[think]:0.5"
    assert options["data.ground_truth_key"] == "solution"
    assert (
        options["actor.policy_loss"] == "vanilla" and options["actor.optim.lr_warmup_steps"] == "10"
    )
    one = "trl grpo --reward_funcs my.rewards.score"
    assert translate("trl", one).options["reward.function"] == "my.rewards:score"
    unknown = translate("trl", "trl grpo --reward_funcs score").notes
    assert any(note.startswith("reward_funcs=score: config.reward.function") for note in unknown)


def test_megatrons_sizes_are_those_of_the_mesh():
    options = translate("verl", MEGATRON).options
    assert [options[f"mesh.{axis}"] for axis in ("model", "stage", "expert")] == ["2", "4", "8"]
    assert options["rollout.mesh.model"] == "4"
    assert options["actor.optimizer_offload"] == options["critic.optimizer_offload"] == "true"
    assert options["algorithm.reference_offload"] == "true"


def test_trls_batches_are_counted():
    """A step takes 8 x 4 prompts, in two mini-batches; 1000 episodes are 31.25 steps."""
    options = translate("trl", TRL).options
    assert options["data.train_batch_size"] == "32" and options["actor.ppo_mini_batch_size"] == "16"
    assert options["trainer.total_training_steps"] == "32"
    assert options["model.path"] == "tuned"
    assert options["critic.path"] == options["reward.model_path"] == "judge"


def test_openrlhf_counts_mini_batches_in_samples_and_has_one_kl_coefficient():
    options = translate("openrlhf", OPENRLHF_BEFORE).options
    assert options["data.train_batch_size"] == "48" and options["rollout.n"] == "4"
    assert options["actor.ppo_mini_batch_size"] == "24"
    assert (
        options["algorithm.kl_ctrl.kl_coef"] == "0.02" and options["algorithm.kl_penalty"] == "k3"
    )
    assert options["critic.path"] == options["reward.model_path"] == "r"
    assert options["trainer.save_freq"] == "10" and options["trainer.test_freq"] == "-1"
    in_loss = translate("openrlhf", OPENRLHF).options
    assert in_loss["actor.kl_loss_coef"] == "0.02" and in_loss["actor.kl_loss_type"] == "k2"
    in_reward = {name: x for name, x in in_loss.items() if name.startswith("algorithm.")}
    assert in_reward == {"algorithm.use_kl_in_reward": "false"}, "hh_rlhf has it"
    # Without a reward model the critic begins as the policy.
    assert in_loss["reward.model_path"] == "" and in_loss["critic.path"] == "m"
    assert in_loss["model.attention"] == "auto" and in_loss["model.dtype"] == "bfloat16"


def test_a_mini_batch_of_half_a_prompt_is_pointed_out():
    notes = translate("openrlhf", "--train_batch_size 6 --n_samples_per_prompt 4").notes
    assert "6 samples are not a whole number of prompts with 4 each" in "\n".join(notes)


def test_an_estimator_without_a_critic_needs_no_folder_for_it():
    command = "--pretrain m --advantage_estimator reinforce_baseline --n_samples_per_prompt 8"
    translated = translate("openrlhf", command)
    assert translated.options["algorithm.adv_estimator"] == "reinforce_plus_plus_baseline"
    assert translated.options["critic.path"] == ""
    assert not [note for note in translated.notes if "changed to" in note or "critic" in note]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a folder with both kinds of models, and rows with the columns of all frameworks."""
    folder = tmp_path_factory.mktemp("inputs")
    problem = "Tom has 3 apples and buys 2."
    write_llama(folder, [problem, "0123456789 #"] * 8, tokens=64)
    (folder / "llama" / "chat_template.jinja").write_text(CHAT)
    architecture = read_architecture(folder / "llama")
    params = tiny.init_params(Transformer(architecture), jax.random.key(1), "scalar")
    export_checkpoint(params, architecture, folder / "judge", source_folder=folder / "llama")
    chat = [{"role": "user", "content": problem}]
    row = {"messages": chat, "prompt": problem, "label": "5", "ground_truth": "5"}
    row |= {"data_source": "openai/gsm8k", "chosen": "5", "rejected": "4", "solution": "5"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "verl" else pytest.mark.exhaustive)
        for name in COMMANDS
    ],
)
def test_a_translated_command_trains(name, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    framework, text = COMMANDS[name]
    translated = translate(framework, text)
    words = shlex.split(translated.command().replace("\\\n", ""))
    config, _ = command_line.read_command_line(["train", *words[3:]])
    has_judge = bool(config.reward.model_path)
    critic = inputs / ("judge" if has_judge else "llama")
    if config.has_adapters or not config.has_critic:
        critic = ""
    small = SIZES | {
        "data.train_files": inputs / "rows.jsonl",
        "data.val_files": inputs / "rows.jsonl",
        "model.path": inputs / "llama",
        "critic.path": critic,
        "reward.model_path": inputs / "judge" if has_judge else "",
    }
    small_words = [f"--config.{option}={value}" for option, value in small.items()]
    main(["train", *words[3:], *small_words, "--workdir=run"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
