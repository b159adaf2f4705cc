"""Commands of verl's, TRL's and OpenRLHF's documentation become commands that start here."""

import re
import shlex

import pytest

from jax_ppo import translate as translate_command
from jax_ppo.config import command_line
from jax_ppo.config.translation import BASE_CONFIGS, translate
from jax_ppo.errors import UserError

# The example of verl's quick start, with what its other examples add.
VERL = """
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files="['test.parquet', 'more.parquet']" \\
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 \\
    custom_reward_function.path=my.py custom_reward_function.name=score \\
    trainer.logger=['console','wandb'] +trainer.val_before_train=False \\
    trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=10 \\
    trainer.total_epochs=15 trainer.ref_fancy_option=3 $@ 2>&1 | tee verl_demo.log
"""
# What examples/ppo_trainer/run_qwen3_8b_fsdp.sh of verl sets beside the above.
VERL_FSDP = """python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.model.use_remove_padding=True critic.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    critic.model.enable_gradient_checkpointing=True
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
    actor_rollout_ref.ref.fsdp_config.param_offload=True critic.use_dynamic_bsz=True
    critic.ppo_max_token_len_per_gpu=24576 critic.fsdp.param_offload=False
    critic.fsdp.optimizer_offload=False trainer.balance_batch=True"""
TRL = """accelerate launch ppo_tldr.py --dataset_name trl-lib/tldr --output_dir out
    --learning_rate 3e-6 --num_ppo_epochs 4 --kl_coef 0.05 --cliprange=0.3 --vf_coef 0.1 --bf16
    --missing_eos_penalty 1.0 --response_length 53 --gradient_checkpointing --lora_target_modules
    q_proj v_proj --lora_r 16 --whatever 3"""
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m/a
   --rollout.n_samples_per_prompt 2 --train.max_epochs 1 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
   --actor.adam.betas 0.9 0.95 --algo.kl.init_coef 0.01 --ds.zero_stage 3 --ds.packing_samples"""


def test_verls_replay_of_routing():
    """R3 is one option here; R2, which records in the old policy's scoring, is none."""
    switch = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    mode = "actor_rollout_ref.actor.router_replay.mode"
    expected = {"actor.router_replay.mode": "R3"}
    for command in (f"{switch}=True", f"{mode}=R3"):
        assert translate("verl", command).options == expected
    for command in (f"{switch}=False", f"{mode}=R2"):
        translated = translate("verl", command)
        assert translated.options == {} and len(translated.notes) == 1


def test_a_command_of_verl():
    translated = translate("verl", VERL)
    options, notes = translated.options, "\n".join(translated.notes)
    assert options == {
        "data.train_files": "$HOME/data/gsm8k/train.parquet",
        "data.val_files": "test.parquet,more.parquet",
        "data.train_batch_size": "256",
        "data.max_prompt_length": "512",
        "data.max_response_length": "256",
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "packing.enabled": "true",
        "actor.optim.lr": "1e-6",
        "actor.ppo_mini_batch_size": "64",
        "actor.ppo_micro_batch_size_per_device": "4",
        "rollout.logprob_micro_batch_size_per_device": "8",
        "rollout.mesh.model": "1",
        "actor.optimizer_offload": "false",
        "critic.optim.lr": "1e-5",
        "critic.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "algorithm.use_kl_in_reward": "true",
        "algorithm.kl_ctrl.kl_coef": "0.001",
        "reward.function": "my.py:score",
        "trainer.logger": "wandb",
        "trainer.val_before_train": "false",
        "trainer.save_freq": "0",
        "trainer.test_freq": "10",
        "trainer.total_epochs": "15",
    }
    assert "rollout.gpu_memory_utilization=0.4: there is no inference server" in notes
    assert "trainer.ref_fancy_option=3: there is no such option" in notes
    assert "rollout.name=vllm: the sampler is built in" in notes and "trainer.nnodes=1" in notes
    assert "a variable of the shell" in notes


def test_every_option_of_verls_example_is_known():
    translated = translate("verl", VERL_FSDP)
    assert translated.options == {
        "packing.enabled": "true",
        "model.gradient_checkpointing": "true",
        "algorithm.reference_offload": "true",
        "critic.param_offload": "false",
        "critic.optimizer_offload": "false",
    }
    assert len(translated.notes) == 8  # packing needs no limits: they are named, with the reason
    assert "there is no such option" not in "\n".join(translated.notes)


def test_commands_of_trl_and_openrlhf():
    options = translate("trl", TRL).options
    assert options["actor.optim.lr"] == options["critic.optim.lr"] == "3e-6"
    assert options["algorithm.use_kl_in_reward"] == "True"
    assert options["algorithm.kl_ctrl.kl_coef"] == "0.05" and options["actor.clip_ratio"] == "0.3"
    assert options["model.dtype"] == "bfloat16" and options["model.lora.rank"] == "16"
    assert options["model.lora.targets"] == "q_proj,v_proj"
    assert any("whatever=3" in note for note in translate("trl", TRL).notes)
    options = translate("openrlhf", OPENRLHF).options
    assert (options["actor.optim.beta1"], options["actor.optim.beta2"]) == ("0.9", "0.95")
    assert options["critic.optim.lr"] == "9e-6" and options["rollout.n"] == "2"


@pytest.mark.parametrize(("framework", "text"), [("verl", VERL), ("openrlhf", OPENRLHF)])
def test_what_is_printed_is_read_by_our_command(framework, text):
    command = translate(framework, text).command(BASE_CONFIGS[framework])
    assert re.search(r" \\\n    --config\.", command)
    words = shlex.split(command.replace("$HOME", "/root").replace("\\\n", ""))
    config, _ = command_line.read_command_line(["train", *words[3:]])
    assert config.rollout.n == (2 if framework == "openrlhf" else 1)


def test_the_command_prints_options_and_what_has_no_counterpart(capsys):
    translate_command.main(["translate", "verl", "data.train_batch_size=8 trainer.nnodes=2"])
    assert capsys.readouterr().out == (
        "python -m jax_ppo.train --config=gsm8k \\\n    --config.data.train_batch_size=8\n\n"
        "To look at:\n"
        "- trainer.nnodes=2: the launcher starts the processes: see docs/launching.md\n"
        "- config.actor.ppo_mini_batch_size=64: must divide config.data.train_batch_size=8; "
        "the nearest divisor is 8\n"
    )


@pytest.mark.parametrize(
    ("framework", "text", "message"),
    [("verll", "", "verll: expected one of verl, trl"), ("verl", "a='b", "cannot be read")],
)
def test_what_is_no_command_is_one_line(framework, text, message):
    with pytest.raises(UserError, match=message):
        translate(framework, text)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("$HOME/x y", "\"$HOME\"'/x y'"),
        ("${SIZE:-8}", '"${SIZE:-8}"'),
        ("$(touch a)", "'$(touch a)'"),
        ('$A"; touch a; "', """"$A"'"; touch a; "'"""),
    ],
)
def test_no_value_runs_as_a_command_of_the_shell(value, quoted):
    """Regression: a value with a dollar sign was put into double quotes as it is."""
    translated = translate("verl", f"trainer.experiment_name={shlex.quote(value)}")
    assert translated.command("gsm8k").endswith(f"--config.experiment_name={quoted}")
    assert "config.experiment_name: a " in translated.notes[0]


@pytest.mark.parametrize(
    ("framework", "command", "note"),
    [
        ("verl", "python3 -m main tr\\ ainer.x=1 ", "tr ainer.x=1: there is no such option"),
        ("verl", "A=1 python3 -m main hybrid_engin=1", "hybrid_engin=1: there is no such option"),
        ("openrlhf", "--pretrian none", "pretrian=none: there is no such option"),
        ("trl", "--save_steps 1e400", "config.trainer.save_freq='1e400': expected int"),
        ("verl", "reward.reward_manager=dapo", "reward.reward_manager=dapo: managers are verl's"),
        ("trl", "--run_name '\x1b[2J'", "config.experiment_name='\\x1b[2J': expected printable"),
        ("trl", "--bf16x '\x1b\n'", "bf16x=·: there is no such option"),
    ],
)
def test_nothing_is_lost_without_a_note(framework, command, note):
    translated = translate(framework, command)
    assert [text for text in translated.notes if text.startswith(note)], translated.notes
    unset = translate(framework, "").options
    assert translated.options == unset and len(translated.notes) == 1


def test_numbers_of_thousands_of_digits_and_commas_in_texts_are_kept():
    size = "1" + "0" * 4400
    notes = translate("trl", f"--per_device_train_batch_size {size}").notes
    assert any("set config.data.train_batch_size" in note for note in notes)
    assert translate("trl", "--run_name 'a, b'").options["experiment_name"] == "a, b"
