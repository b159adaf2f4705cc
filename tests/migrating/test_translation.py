"""Commands of verl's, TRL's and OpenRLHF's documentation become commands that start here."""

import random
import re
import shlex
from pathlib import Path

import pytest

from jax_ppo import translate as translate_command
from jax_ppo.config import command_line
from jax_ppo.config.loading import parse_option
from jax_ppo.config.option import option_value
from jax_ppo.config.schema import all_options
from jax_ppo.config.suggestions import read_framework
from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import parse_row
from jax_ppo.errors import UserError
from jax_ppo.migrating.peer_commands import answer_of, is_known
from jax_ppo.migrating.translation import translate

# The example of verl's quick start, with what its other examples add.
VERL = """
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files="['test.parquet', 'more.parquet']" data.max_prompt_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    custom_reward_function.path=my.py custom_reward_function.name=score \\
    trainer.logger=['console','wandb'] +trainer.val_before_train=False \\
    trainer.nnodes=1 trainer.ref_fancy_option=3 $@ 2>&1 | tee verl_demo.log
"""
PROGRAMS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "trl": "accelerate launch ppo_tldr.py",
    "openrlhf": "python3 -m openrlhf.cli.train_ppo_ray",
}
WORDS = ("python", "ppo", "learning rate", "=", "a=1", "A.b=2", "--", "$@", "|", "lr", "#", "-x")
NO_COMMANDS = (
    "",
    "\n",
    "trainer = PPOTrainer(args=PPOConfig(output_dir='x'))",
    "import trl",
    "ppo_trainer.yaml",
    "bash no_such_script.sh",
    "python3 my_own.py",
    "train.py --my_flag 1",
    "x" * 5000,
    "config: {a: 1}",
)


@pytest.mark.parametrize("framework", PROGRAMS)
def test_text_without_a_program_and_an_option_is_refused(framework):
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randrange(1, 6))) for _ in range(200)]
    for text in (*NO_COMMANDS, *texts):
        with pytest.raises(UserError) as caught:
            translate(framework, text)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("framework", PROGRAMS)
def test_another_frameworks_command_and_another_method_are_refused(framework):
    for other in {*PROGRAMS} - {framework, "trl"}:
        with pytest.raises(UserError, match=f"python -m jax_ppo.translate {other}"):
            translate(framework, PROGRAMS[other])
    method = {"verl": "-m verl.trainer.main_eval", "trl": "dpo.py --beta 0.1"}
    with pytest.raises(UserError, match="nothing here does the same"):
        translate(framework, f"python {method.get(framework, '-m openrlhf.cli.train_dpo')}")


@pytest.mark.parametrize("value", ["7", "text", "a/b"])
@pytest.mark.parametrize("framework", PROGRAMS)
def test_every_option_of_the_tables_is_translated_or_answered_in_words(framework, value):
    """In one command of all: each is in the result or in a note, and no name is unknown."""
    peer = read_framework(framework)
    parts = [(x.names, x.splits, x.subsets, x.weights, x.only_with) for x in peer.data]
    data = {name for group in parts for part in group for name in part}
    for program in (x for x in peer.programs if x.base):
        tables = {**peer.options, **program.options}
        names = {name.replace("*", "x") for name in tables} - data
        flags = [f"{'' if framework == 'verl' else '--'}{name}={value}" for name in names]
        start = "python -m " + program.name
        translated = translate(framework, f"{start} {' '.join(flags)}")
        notes = "\n".join(translated.notes)
        assert "there is no such option" not in notes
        harmless = {x for line in translated.remarks for x in line.partition(": ")[0].split(", ")}
        for name in names:
            answer = answer_of(program, framework, name)
            # `sft` and `reward_model` have the actor's options under other names.
            targets = {
                ours
                for target in re.findall(r"config\.([\w.]*\w)", answer)
                for ours in (target, re.sub(r"^\w+\.(ppo_)?", "supervised.", target))
            }
            # A switch needs no line where the options that it switches on are set.
            is_noted = any(f"{noted}=" in notes for noted in {name, *targets})
            is_noted |= bool({name, *targets} & harmless) or answer.startswith("set ")
            assert is_noted or targets & translated.options.keys(), name


@pytest.mark.parametrize(
    ("framework", "text", "start"),
    [
        ("verl", PROGRAMS["verl"], "train --config=gsm8k"),
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer", "sft --config=hh_rlhf_sft"),
        ("trl", "python examples/scripts/ppo/ppo.py", "train --config=hh_rlhf"),
        ("trl", "trl grpo --beta 0.1", "train --config=gsm8k_grpo"),
        ("trl", "python my_rloo.py --beta 0.1", "train --config=gsm8k_grpo"),
        ("trl", "trl sft", "sft --config=hh_rlhf_sft"),
        ("trl", "accelerate launch reward_modeling.py", "reward_model --config=hh_rlhf_reward"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft", "sft --config=hh_rlhf_sft"),
        ("openrlhf", "-m openrlhf.cli.train_rm", "reward_model --config=hh_rlhf_reward"),
    ],
)
def test_a_command_becomes_one_of_the_same_task(framework, text, start):
    lr = "optim.lr=3e-4" if "sft" in start else "actor_rollout_ref.actor.optim.lr=3e-4"
    flag = {"verl": lr, "trl": "--learning_rate 3e-4"}.get(framework, "--adam.lr 3e-4")
    translated = translate(framework, f"{text} {flag}")
    assert translated.command().startswith(f"python -m jax_ppo.{start} ")
    name = "actor" if start.startswith("train") else "supervised"
    assert translated.options[f"{name}.optim.lr"] == "3e-4"
    words = shlex.split(translated.command().replace("\\\n", ""))
    command_line.read_command_line([start, *words[3:]], start.split()[0])


@pytest.mark.parametrize("flags", ["", "--train.num_episodes 2"])
def test_epochs_of_a_command_replace_the_steps_of_the_base(flags):
    """Regression: hh_rlhf's 500 steps remained, and epochs did nothing."""
    translated = translate("openrlhf", f"python -m openrlhf.cli.train_ppo_ray {flags}")
    words = shlex.split(translated.command().replace("\\\n", ""))[2:]
    config, _ = command_line.read_command_line(words)
    assert config.trainer.total_training_steps is None
    assert config.trainer.total_epochs == (2 if flags else 1)


def test_sizes_of_ppo_are_not_lost_in_a_command_of_sft():
    notes = translate("trl", "trl sft --num_mini_batches 2 --total_episodes 9").notes
    assert {note.partition("=")[0] for note in notes} > {"num_mini_batches", "total_episodes"}


def test_a_script_of_a_user_is_said_to_be_unseen():
    notes = translate("trl", "python train_ppo.py --learning_rate 1e-6").notes
    assert "no program: read as options of ppo" in translate("trl", "--kl_coef 0.1").remarks
    assert notes[0] == ("train_ppo.py: its contents are not seen; its options were read as ppo's")
    assert not [note for note in translate("trl", "python ppo.py").notes if "not seen" in note]


def test_a_shell_script_is_read_with_its_variables_and_lists(tmp_path):
    script = tmp_path / "my run.sh"
    script.write_text(
        "#!/bin/bash\nset -x\nexport LR=3e-7\nSIZE=${SIZE:-64}  # a comment\nHOST=$(hostname)\n"
        "DATA=(\n    data.train_files=$HOME/a.parquet\n    data.train_batch_size=$SIZE\n)\n"
        "python3 -m verl.trainer.main_ppo \\\n    actor_rollout_ref.actor.optim.lr=${LR} \\\n"
        '    trainer.experiment_name=$HOST "${DATA[@]}" $@\n'
        "python3 eval.py data.train_batch_size=1\n"
    )
    for text in (str(script), f"bash {script}"):
        translated = translate("verl", text)
        assert translated.options == {
            "data.train_files": "$HOME/a.parquet",
            "data.train_batch_size": "${SIZE:-64}",
            "actor.optim.lr": "3e-7",
            "experiment_name": "$HOST",
            "data.val_files": "",
        }
        assert "$@: what the shell puts in its place is not seen" in translated.notes
        assert not [note for note in translated.notes if "DATA[@]" in note]


@pytest.mark.parametrize(
    ("framework", "lines", "expected"),
    [
        (
            "openrlhf",
            "read -r -d '' commands <<EOF\nopenrlhf.cli.train_sft \\\n  --adam.lr 3e-6\nEOF\n"
            "deepspeed --module $commands\n",
            {"supervised.optim.lr": "3e-6", "supervised.optim.lr_warmup_steps": "0"},
        ),
        (
            "verl",
            'echo "Usage: my_sft.sh <gpus>"\ntorchrun -m verl.trainer.fsdp_sft_trainer \\\n'
            "  optim.lr=3e-6 \\\n \\ \n",
            {"supervised.optim.lr": "3e-6", "supervised.optim.lr_warmup_steps": "0"},
        ),
        (
            "verl",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \\\n"
            "  actor_rollout_ref.rollout.max_num_seqs=4 \\\n  trainer.total_epochs=$((N + 2))\n",
            {"mesh.fsdp": "-1", "mesh.data": "1", "rollout.max_num_seqs": "4"},
        ),
    ],
)
def test_forms_of_scripts_in_examples_are_read(framework, lines, expected, tmp_path):
    (tmp_path / "a.sh").write_text(lines)
    translated = translate(framework, str(tmp_path / "a.sh"))
    assert translated.options == translate(framework, lines).options == expected
    assert not [note for note in translated.notes if "not an option" in note]
    assert ("$((N+2))" in " ".join(translated.notes)) == ("$((" in lines)


def test_sums_of_variables_are_computed_and_defaults_stay_variables(tmp_path):
    """Regression: DAPO's lengths came out as empty variables, its paths as text with a `$`."""
    (tmp_path / "a.sh").write_text(
        'len=$((1024 * 2 + 10 / 4 - 2))\nHOUSE=${HOUSE:-"${HOME}/verl"}\n'
        'MODEL=${MODEL:-"${HOUSE}/Qwen"}\npython3 -m verl.trainer.main_ppo \\\n'
        "data.max_prompt_length=$len data.max_response_length=$((len + len)) \\\n"
        'actor_rollout_ref.model.path="${MODEL}"\n'
    )
    translated = translate("verl", str(tmp_path / "a.sh"))
    model = "${MODEL:-${HOUSE:-${HOME}/verl}/Qwen}"
    assert translated.options == {
        "data.max_prompt_length": "2048",
        "data.max_response_length": "4096",
        "model.path": model,
    }
    assert f'--config.model.path="{model}"' in translated.command()


def test_two_options_for_one_of_ours_are_told_apart():
    """Regression: the last one counted, without a line."""
    names = [f"actor_rollout_ref.{x}.log_prob_micro_batch_size_per_gpu" for x in ("rollout", "ref")]
    translated = translate("verl", f"{PROGRAMS['verl']} {names[0]}=8 {names[1]}=4")
    assert translated.options == {"rollout.logprob_micro_batch_size_per_device": "4"}
    # Results are the same for any size of micro-batches.
    assert (
        "rollout.log_prob_micro_batch_size_per_gpu=8: ref.log_prob_micro_batch_size_per_gpu=4 sets "
        "config.rollout.logprob_micro_batch_size_per_device as well, and counts"
    ) in translated.remarks
    equal = translate("verl", f"{PROGRAMS['verl']} {names[0]}=4 {names[1]}=4")
    assert "as well" not in " ".join(equal.remarks + equal.notes)
    seeds = translate("verl", f"{PROGRAMS['verl']} data.seed=1 trainer.seed=2")
    assert "data.seed=1: trainer.seed=2 sets config.seed as well, and counts" in seeds.notes
    # What limits importance weights is not what they are; batches of generation are no steps.
    correction = "algorithm.rollout_correction"
    flags = f"{correction}.rollout_is=token {correction}.rollout_rs=seq_mean_k1"
    translated = translate("verl", f"{PROGRAMS['verl']} {flags} {correction}.bypass_mode=True")
    assert translated.options == {"algorithm.rollout_is": "token"}
    noted = [note for note in translated.notes if "rollout_correction" in note]
    assert [note.partition("=")[0].rpartition(".")[2] for note in noted] == [
        "rollout_rs",
        "bypass_mode",
    ]
    sizes = "data.train_batch_size=512 data.gen_batch_size=1536"
    assert translate("verl", f"{PROGRAMS['verl']} {sizes}").options == {
        "data.train_batch_size": "512"
    }


@pytest.mark.parametrize("switch", ["overlong_buffer.enable", "enable"])
def test_what_is_switched_off_stays_off(switch):
    """Regression: DAPO's penalty, off in the command, was on in its translation."""
    flags = f"reward_model.{switch}=False reward_model.overlong_buffer.len=9"
    translated = translate("verl", f"{PROGRAMS['verl']} {flags}")
    assert translated.options == {}
    assert translated.remarks[:2] == [
        f"reward_model.{switch}: off here, too",
        f"reward_model.overlong_buffer.len: reward_model.{switch} is False",
    ]
    flags = "algorithm.filter_groups.enable=False algorithm.filter_groups.metric=score"
    assert len(translate("verl", f"{PROGRAMS['verl']} {flags}").options) == 2
    flags = "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=9"
    assert translate("verl", f"{PROGRAMS['verl']} reward_model.enable=False {flags}").options


def test_a_misspelled_option_of_another_framework_gets_its_nearest_name():
    flag = "actor_rollout_ref.actor.clip_ration=0.3"
    assert translate("verl", f"{PROGRAMS['verl']} {flag}").notes[0] == (
        "actor.clip_ration=0.3: there is no such option; did you mean actor.clip_ratio?"
    )
    notes = translate("trl", "python ppo.py --learning_rat 3").notes
    assert "learning_rat=3: there is no such option; did you mean learning_rate?" in notes


@pytest.mark.parametrize("framework", PROGRAMS)
def test_every_default_is_carried_or_listed(framework):
    """A program's default is the base's value, an option of the command, or a remark."""
    for program in (x for x in read_framework(framework).programs if x.base):
        for name, value in program.defaults.items():
            assert is_known(program, framework, name), name
            answer = answer_of(program, framework, name) or f"config.{name}"
            notes = translate(framework, f"python -m {program.name} --use_peft").notes
            is_noted = any(f"default {name}={value}: {answer}" in note for note in notes)
            assert is_noted or "config." in answer, f"{name}={value} is lost"
        assert all(parse_option(name, value) is not None for name, value in program.always.items())


def test_trls_defaults_reach_the_configuration():
    command = "python ppo.py --dataset_name a/b --reward_model_path judge --sft_model_path m"
    words = shlex.split(translate("trl", command).command().replace("\\\n", ""))
    config, _ = command_line.read_command_line(["train", *words[3:]])
    assert config.data.train_files == "hf:a/b:train" and config.data.val_files == ""
    assert config.critic.path == config.reward.model_path == "judge" and config.critic.keep_head
    assert (config.actor.ppo_epochs, config.rollout.temperature) == (4, 0.7)
    assert (config.critic.value_loss_coef, config.critic.cliprange_value) == (0.1, 0.2)
    assert (config.actor.optim.lr, config.actor.optim.lr_schedule) == (3e-6, "linear")
    assert (config.data.train_batch_size, config.data.max_response_length) == (8, 53)
    assert (config.actor.clip_ratio_c, config.reward.normalize) == (0, "none")
    assert (config.reward.missing_eos_penalty, config.trainer.total_epochs) == (0, 3)


@pytest.mark.parametrize(
    ("framework", "words", "files"),
    [
        ("trl", "--dataset_name a/b --dataset_config main", ("hf:a/b/main:train", "")),
        ("trl", "--dataset_name a/b --eval_strategy steps", ("hf:a/b:train", "hf:a/b:test")),
        ("trl", "--dataset_name a/b --dataset_train_split x", ("hf:a/b:x", "")),
        ("trl", "--dataset_name a/b --eval_strategy no", ("hf:a/b:train", "")),
        ("openrlhf", "--prompt_data ./x.jsonl --eval_dataset c/d", ("./x.jsonl", "hf:c/d:train")),
        (
            "openrlhf",
            "--data.prompt_dataset a/b,c.parquet --data.prompt_probs 0.3,0.7",
            ("hf:a/b:train*0.3,c.parquet*0.7", ""),
        ),
    ],
)
def test_names_of_data_sets_become_addresses_on_the_hub(framework, words, files):
    options = translate(framework, f"{PROGRAMS[framework]} {words}").options
    assert (options["data.train_files"], options["data.val_files"]) == files


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("actor.optim.warmup_steps=5", "--config.actor.optim.lr_warmup_steps=5"),
        ("trainer.nnodes=1", "do:\n- trainer.nnodes: the launcher starts the processes"),
        ("trainer.nnodes=2", "act:\n- trainer.nnodes=2: the launcher starts the processes"),
        ("trainer.n_gpus_per_node=4", "n_gpus_per_node: a process has all devices that it sees"),
        ("rollout.n_gpus_per_node=2", "rollout.n_gpus_per_node=2: config.rollout.mesh.devices"),
        ("actor.megatron_config.a.b=1", "actor.megatron_config.a.b: Megatron is not used"),
        ("critic.model.fsdp_config.param_offload=True", "--config.critic.param_offload=true"),
    ],
)
def test_names_of_verls_own_pages_are_answered(name, answer, capsys):
    translate_command.main(["translate", "verl", f"{PROGRAMS['verl']} {name}"])
    assert answer in capsys.readouterr().out


@pytest.mark.parametrize(
    ("framework", "words", "expected"),
    [
        ("verl", "actor.policy_loss.loss_mode=geo_mean", {"actor.policy_loss": "gmpo"}),
        ("verl", "actor.policy_loss.loss_mode=gpg", {"actor.policy_loss": "reinforce"}),
        ("verl", "trainer.resume_mode=disable", {"trainer.resume": "false"}),
        ("openrlhf", "--advantage_estimator dr_grpo", {"algorithm.adv_estimator": "dr_grpo"}),
        ("openrlhf", "--reward.clip_range -5 5", {"reward.clip": "5"}),
        (
            "openrlhf",
            "--eval_n_samples_per_prompt 4 --eval_dataset x",
            {"rollout.val_kwargs.n": "4", "rollout.val_kwargs.temperature": "0.6"},
        ),
        (
            "openrlhf",
            "--actor.adam.betas 0.9 0.95 --critic.adam.lr 9e-6",
            {"actor.optim.beta1": "0.9", "actor.optim.beta2": "0.95", "critic.optim.lr": "9e-6"},
        ),
        ("trl", "--learning_rate 3e-6", {"actor.optim.lr": "3e-6", "critic.optim.lr": "3e-6"}),
        ("trl", "--bf16 --cliprange=0.3", {"model.dtype": "bfloat16", "actor.clip_ratio": "0.3"}),
        (
            "trl",
            "--kl_coef 0.05",
            {"algorithm.kl_ctrl.kl_coef": "0.05", "algorithm.use_kl_in_reward": "True"},
        ),
        (
            "trl",
            '--lora_target_modules "k_proj", "o_proj" --use_peft',  # as TRL's documentation has it
            {"model.lora.targets": "k_proj,o_proj"},
        ),
    ],
)
def test_values_of_another_name_are_translated(framework, words, expected):
    options = translate(framework, f"{PROGRAMS[framework]} {words}").options
    assert {name: options.get(name) for name in expected} == expected


def test_a_weight_of_zero_turns_its_loss_off():
    assert translate("trl", "trl grpo --beta 0.0").options["actor.use_kl_loss"] == "False"


PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
# Names in the page's left column that are arguments in Python, or values.
NO_OPTIONS = {"value_model", "peft_config", "rollout.val_kwargs"}


def rows_of_the_page():
    """Yield framework, its options and ours of each row of the page's tables."""
    known = {option.name for option in all_options()}
    framework = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## From "):
            framework = line.removeprefix("## From ").lower()
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")]
        if not line.startswith("| ") or len(cells) != 2 or not framework or not cells[0]:
            continue
        section = ""
        names = []
        for text in cells[0]:
            name = re.split(r"[ =(]", text.removeprefix("--").removeprefix("actor_rollout_ref."))[0]
            # The first name of a row has the section of those that follow.
            names.append(name if "." in name or not section else f"{section}{name}")
            section = section or name.rpartition(".")[0] + "." * ("." in name)
        is_same = "the same" in line.split(" | ")[1]
        ours = {re.split(r"[ =]", text)[0] for text in cells[1]}
        yield framework, names, (ours & known) | {name for name in names if is_same}, line


def test_the_page_says_what_the_translator_does():
    """Each row's options are in the tables, and the row names their counterparts."""
    known = {option.name for option in all_options()}
    count = 0
    for framework, names, ours, line in rows_of_the_page():
        if names[0] in ("PPOConfig", "train_ppo_ray", "verl"):
            continue
        program = read_framework(framework).programs[0]
        for name in set(names) - NO_OPTIONS:
            count += 1
            assert is_known(program, framework, name), (name, line)
            answer = answer_of(program, framework, name) or f"config.{name}"
            targets = known & set(re.findall(r"config\.([\w.]*\w)", answer))
            is_none = "none" in line and not re.fullmatch(r"config\.[\w.]+", answer)
            assert targets <= ours or is_none, (name, answer, line)
    assert count > 50


def test_the_page_shows_what_its_first_command_prints(capsys):
    page = PAGE.read_text()
    command, printed = re.search(
        r"```bash\n(.*?)\n```\n\n```text\n(.*?)```", page, re.DOTALL
    ).groups()
    translate_command.main(["translate", *shlex.split(command)[3:]])
    assert capsys.readouterr().out == printed


def test_verls_replay_of_routing():
    """R3 is one option here; R2, which records in the old policy's scoring, is none."""
    switch = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    mode = "actor_rollout_ref.actor.router_replay.mode"
    expected = {"actor.router_replay.mode": "R3"}
    for command in (f"{switch}=True", f"{mode}=R3"):
        assert translate("verl", command).options == expected
    for command in (f"{switch}=False", f"{mode}=R2"):
        translated = translate("verl", command)
        assert translated.options == {} and "config.actor.router_replay.mode" in "".join(
            translated.notes[:1] + translated.remarks[:1]
        )


def test_a_command_of_verl():
    translated = translate("verl", VERL)
    options, notes = translated.options, "\n".join(translated.notes)
    assert options == {
        "data.train_files": "$HOME/data/gsm8k/train.parquet",
        "data.val_files": "test.parquet,more.parquet",
        "data.max_prompt_length": "512",
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "packing.enabled": "true",
        "actor.optim.lr": "1e-6",
        "rollout.mesh.model": "1",
        "actor.optimizer_offload": "false",
        "critic.optim.lr": "1e-5",
        "critic.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "reward.function": "my.py:score",
        "trainer.logger": "wandb",
        "trainer.val_before_train": "false",
    }
    assert "trainer.ref_fancy_option=3: there is no such option" in notes
    assert "$HOME" not in notes  # a path
    remarks = "\n".join(translated.remarks)
    assert "rollout.gpu_memory_utilization: no server samples" in remarks
    assert "rollout.name: the sampler is built in" in remarks and "trainer.nnodes: " in remarks
    # What gsm8k has is not printed, and its instruction is not added to other data.
    command = translated.command()
    assert "max_prompt_length" not in command and "optim.lr=" not in command
    assert "critic.path" not in command  # the same as model.path, as without it
    assert "--config.data.instruction=''" in command


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
        ("${DATA:-~/data}", '"${DATA:-~/data}"'),
        ("$(touch a)", "'$(touch a)'"),
        ('$A"; touch a; "', """"$A"'"; touch a; "'"""),
    ],
)
def test_no_value_runs_as_a_command_of_the_shell(value, quoted):
    """Regression: a value with a dollar sign was put into double quotes as it is."""
    translated = translate("verl", f"trainer.experiment_name={shlex.quote(value)}")
    assert f"--config.experiment_name={quoted} \\\n" in translated.command()
    # Variables that are always set, or have a default, need no line.
    noted = [x for x in translated.notes if x.startswith("config.experiment_name: a")]
    assert len(noted) == (value[:2] in ("$(", "$A"))


@pytest.mark.parametrize(
    ("framework", "words", "note"),
    [
        ("verl", "tr\\ ainer.x=1 ", "tr ainer.x=1: there is no such option"),
        ("verl", "hybrid_engine", "hybrid_engine: not an option, and not read"),
        ("verl", "trainer.x=" + "猫" * 150, "trainer.x=猫"),  # no name of a file has its bytes
        ("verl", '"$@"', "$@: what the shell puts in its place is not seen"),
        ("trl", "--save_steps 1e400", "config.trainer.save_freq='1e400': expected int"),
        ("trl", "--config ppo.yaml", "config=ppo.yaml: the options in the file are not seen"),
        ("trl", "--num_sample_generations 3", "num_sample_generations: config.trainer.test_freq"),
        ("verl", "reward.reward_manager=dapo", "reward.reward_manager=dapo: naive here; other"),
        ("trl", "--run_name '\x1b[2J'", "config.experiment_name='\\x1b[2J': expected printable"),
        ("trl", "--bf16x '\x1b\n'", "bf16x=·: there is no such option"),
        ("verl", "custom_reward_function.name=f", "custom_reward_function.name=f: without"),
        ("openrlhf", "--prompt_data imdb", "prompt_data=imdb: config.data.train_files=hf:"),
        ("trl", "--kl_coef none 2>&1 | tee x=1", "kl_coef=none: config.algorithm.kl_ctrl"),
    ],
)
def test_nothing_is_lost_without_a_note(framework, words, note):
    translated = translate(framework, f"{PROGRAMS[framework]} {words}")
    unset = translate(framework, PROGRAMS[framework])
    unset_lines = unset.notes + unset.remarks
    new = [text for text in translated.notes + translated.remarks if text not in unset_lines]
    assert len(new) == 1 and new[0].startswith(note), translated.notes
    assert translated.options == unset.options


def test_numbers_of_thousands_of_digits_and_commas_in_texts_are_kept():
    size = "1" + "0" * 4400
    notes = translate("trl", f"--per_device_train_batch_size {size}").notes
    assert any("set config.data.train_batch_size" in note for note in notes)
    assert translate("trl", "--run_name 'a, b'").options["experiment_name"] == "a, b"


@pytest.mark.parametrize(
    ("words", "adapters"),
    [
        ("--lora_r 8", {}),
        ("--use_peft", {"rank": "16", "alpha": "32", "targets": "q_proj,v_proj"}),
        ("--use_peft False --lora_alpha 8", {}),
        (
            "--lora_alpha 8 --use_peft --lora_target_modules all-linear",
            {"rank": "16", "alpha": "8", "targets": "all-linear"},
        ),
    ],
)
def test_trl_has_adapters_with_use_peft_alone(words, adapters):
    """Regression: lora_r alone made adapters, and TRL's alpha was lost."""
    translated = translate("trl", f"{PROGRAMS['trl']} {words}")
    assert {
        name.removeprefix("model.lora."): value
        for name, value in translated.options.items()
        if "lora" in name
    } == adapters
    ignored = [line for line in translated.remarks if line.endswith(": use_peft is False")]
    assert len(ignored) == (not adapters)
    # Its adapters have dropout by default.
    assert any("lora_dropout=0.05" in note for note in translated.notes) == bool(adapters)


def test_semicolons_end_words_and_only_whole_words_begin_comments(tmp_path):
    """Regressions: values had semicolons, and ${NAME##*/} hid all that followed."""
    script = tmp_path / "run.sh"
    script.write_text(
        "length=7; lr=1e-6 # epochs=3\nif true; then\n"
        "python3 -m verl.trainer.main_ppo data.max_prompt_length=$length \\\n"
        "  trainer.experiment_name=${MODEL##*/} actor.optim.lr=$lr trainer.total_epochs=2; fi\n"
    )
    translated = translate("verl", str(script))
    assert translated.options["data.max_prompt_length"] == "7"
    assert translated.options["actor.optim.lr"] == "1e-6"
    assert translated.options["trainer.total_epochs"] == "2"
    assert "config.experiment_name: an expression of the shell, which stays text" in (
        translated.notes
    )


SCRIPT = """
import torch
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2-0.5B"
length: int = 512
data = load_dataset("json", data_files={"train": "rows.jsonl"}, split="train")
CHANGED

def brevity(completions, **kwargs):
    return [-len(x) for x in completions]

args = GRPOConfig(output_dir="out", learning_rate=5e-6, max_completion_length=length - 256,
    max_steps=25 * 8, warmup_ratio=0.1, optim="adamw_torch", bf16=torch.cuda.is_bf16_supported(),
    run_name=f"{MODEL}", scale_rewards=False, top_k=None, temperature=rate, **more)
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16).to("cuda")
trainer = GRPOTrainer(model=model, reward_funcs=[brevity], args=args, train_dataset=data,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
"""


def test_a_python_script_is_read_and_never_run(tmp_path, monkeypatch):
    """Literals, names of them and sums: 512 - 256 tokens, 25 x 8 steps, a tenth of them 20."""
    monkeypatch.chdir(tmp_path)
    run = "open('ran', 'w')\nif __name__ == '__main__':\n    trainer.train()\n"
    Path("grpo.py").write_text(SCRIPT.replace("CHANGED", "") + run)
    for text in ("grpo.py", "accelerate launch grpo.py --seed 3"):
        translated = translate("trl", text)
        expected = {
            "model.path": "Qwen/Qwen2-0.5B",
            "data.train_files": "rows.jsonl",
            "data.max_response_length": "256",
            "trainer.total_training_steps": "200",
            "actor.optim.lr_warmup_steps": "20",
            "algorithm.norm_adv_by_std_in_grpo": "false",
            "model.lora.rank": "4",
            "model.lora.alpha": "8",  # PEFT's default, not TRL's
            "model.lora.targets": "q_proj,v_proj",
            "reward.function": "grpo_rewards.py:brevity",  # not the script, which trains
        }
        assert expected.items() <= translated.options.items()
        assert translated.notes[:2] == [
            "grpo.py:13: GRPOConfig(bf16, run_name, temperature, **more): values that are not "
            "literal are not read",
            "grpo_rewards.py: copy the script's reward functions to this file",
        ]
    assert translated.options["seed"] == "3" and not Path("ran").exists()
    Path("grpo.py").write_text(SCRIPT.replace("CHANGED", "data = data.map(add_prompt)"))
    translated = translate("trl", "grpo.py")
    assert "grpo.py:8: map(...) is not read; write the rows that it makes to a file" in (
        translated.notes
    )


def test_what_is_not_read_of_a_python_script_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(script):
        Path("other.py").write_text(script)
        return translate("trl", "other.py")

    for script, message in (
        ("trainer = DPOTrainer(args=DPOConfig(beta=0.1))", "nothing here does the same"),
        ("x = (", "cannot be read as Python"),
    ):
        with pytest.raises(UserError, match=message):
            read(script)
    translated = read("PPOConfig(seed=1)\nload_dataset('a/b', split='train[:9%]')")
    assert translated.options["data.train_files"] == "hf:a/b:train"
    assert translated.notes[0] == "other.py:2: split=train[:9%]: only rows are counted"
    translated = read(
        "PPOConfig(lr_scheduler_type='cosine_with_restarts')\n"
        "load_dataset('json', data_files='a.jsonl')\nload_dataset('json', data_files='b.jsonl')"
    )
    held_out = "load_dataset(b.jsonl) is not read; name held-out data in config.data.val_files"
    assert f"other.py:3: {held_out}" in translated.notes
    assert not any("names no held-out data" in remark for remark in translated.remarks)
    assert any("'constant', 'linear', 'cosine'; changed to" in x for x in translated.notes)
    unread = "load_dataset(...) is not read; name training data in config.data.train_files"
    assert read("PPOConfig(seed=1)\nload_dataset(path)").notes[0] == f"other.py:2: {unread}"


def test_what_the_run_refuses_becomes_the_nearest_valid_value():
    """Each command is refused as it is, and its translation is accepted."""
    lora = (
        "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.ref.fsdp_config.param_offload=True"
    )
    for flags, name, value in (
        ("data.train_batch_size=96 actor.ppo_mini_batch_size=50", "actor.ppo_mini_batch_size", 48),
        ("trainer.save_freq=-7", "trainer.save_freq", -1),
        ("algorithm.adv_estimator=grpo", "rollout.n", 2),
        (lora, "algorithm.reference_offload", False),
        ("rollout.temperature=warm", "rollout.temperature", 1.0),
    ):
        translated = translate("verl", f"{PROGRAMS['verl']} {flags}")
        noted = [note for note in translated.notes if "; changed to '" in note]
        assert noted[0].startswith(f"config.{name}="), flags
        words = shlex.split(translated.command().replace("\\\n", ""))
        config, _ = command_line.read_command_line(["train", *words[3:]])
        assert option_value(config, name) == value


def test_trls_command_needs_no_second_trl():
    """Regression: `translate trl grpo --seed 3` was read as a command of PPO."""
    assert translate("trl", "grpo --seed 3") == translate("trl", "trl grpo --seed 3")
    with pytest.raises(UserError, match="dpo: nothing here does the same"):
        translate("trl", "dpo --seed 3")


def test_verls_keys_within_extra_info_are_read():
    command = (
        "torchrun -m verl.trainer.fsdp_sft_trainer data.prompt_key=extra_info "
        "data.response_key=extra_info data.prompt_dict_keys=['question'] "
        "+data.response_dict_keys=['answer']"
    )
    options = translate("verl", command).options
    assert options["data.prompt_key"] == "question"
    assert options["supervised.response_key"] == "answer"
    row = {
        "prompt": [{"role": "user", "content": "1+1? Think."}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"question": "1+1?", "answer": "#### 2"},
    }
    example = parse_row(row, "here", Columns(prompt="question", response="answer"))
    assert example.prompt == ({"role": "user", "content": "1+1?"},)
    assert example.response == "#### 2"
