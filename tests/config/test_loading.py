"""A wrong option fails before heavy imports, with its name, value and what was expected."""

import dataclasses
import inspect
import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from jax_ppo.config import command_line, loading, schema
from jax_ppo.config.option import option_value
from jax_ppo.config.validation import train_notes
from jax_ppo.errors import UserError


def validated(**changes):
    """Return a valid config with changes, dotted names written with __ for each dot."""
    values = loading.default_config()
    values.data.train_files = "arithmetic:8"
    values.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in changes.items()}
    )
    return loading.from_config_dict(values)


SEPARATE = {
    "rollout__max_staleness": 1,
    "rollout__mesh__devices": 2,
    "algorithm__rollout_is": "token",
}


@pytest.mark.parametrize(
    ("overrides", "is_said"),
    [
        ({"data.train_files": "mine.jsonl"}, True),
        ({"data.train_files": "mine.jsonl", "data.val_files": "arithmetic:64:heldout"}, False),
        ({"data.train_files": "mine.jsonl", "data.val_files": ""}, False),
        ({"data.train_files": "arithmetic:64"}, False),
    ],
)
def test_held_out_rows_of_a_configuration_are_named_beside_other_training_data(
    overrides, is_said, caplog
):
    overrides = {"model.path": "somewhere", **overrides}
    loading.load_config("arithmetic", overrides)
    said = "config.data.val_files='arithmetic:512:heldout': held-out rows of the configuration, bes"
    assert (said in caplog.text) == is_said


def test_defaults_are_valid_and_hashable():
    assert hash(validated()) == hash(validated())


def test_every_option_has_a_meaning():
    assert len(schema.all_options()) > 60
    assert all(len(option.facts.doc) > 3 for option in schema.all_options())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor__clip_ratio": -1.0}, r"config\.actor\.clip_ratio=-1\.0: expected more than 0"),
        ({"actor__clip_ratio": float("nan")}, r"config\.actor\.clip_ratio=nan"),
        ({"algorithm__gamma": 2.0}, r"config\.algorithm\.gamma=2\.0: expected at most 1"),
        ({"rollout__temperature": 0.0}, r"config\.rollout\.temperature=0\.0: expected more than 0"),
        (
            {"data__train_batch_size": 48},
            r"config\.actor\.ppo_mini_batch_size=64.*train_batch_size=48",
        ),
        ({"actor__loss_agg_mode": "token_mean"}, r"Did you mean 'token-mean'"),
        ({"actor__clip_ratio_c": 0.5}, r"config\.actor\.clip_ratio_c=0\.5"),
        ({"packing__row_length": 100}, r"config\.packing\.row_length=100.*1024"),
        (
            {"mesh__data": -1, "mesh__fsdp": -1},
            r"config\.mesh\.fsdp=-1: only one of config\.mesh\.model=1, fsdp=-1 "
            r"and data=-1 can be -1; set the others",
        ),
        (
            {"mesh__model": -1},
            r"config\.mesh\.model=-1: only one of .* data=-1 can be -1; set the",
        ),
        ({"mesh__model": 0}, r"config\.mesh\.model=0: expected -1 or at least 1"),
        (
            {"mesh__context": 4, "packing__row_length": 1028},
            r"config\.packing\.row_length=1028: expected a multiple of twice "
            r"config\.mesh\.context=4",
        ),
        (
            {"mesh__context": 2, "actor__router_aux_loss_coef": 0.1},
            r"config\.actor\.router_aux_loss_coef=0\.1: .*config\.mesh\.context=2",
        ),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__use_reference": False},
            r"use_kl_in_reward=True: needs the reference",
        ),
        ({"data__train_files": ""}, r"config\.data\.train_files=''"),
        ({"data__train_files": "x.jsonl"}, r"config\.model\.path=''"),
        ({"rollout__top_k": 0}, r"config\.rollout\.top_k=0"),
        (
            {"rollout__max_staleness": 1},
            r"config\.rollout\.max_staleness=1.*config\.algorithm\.rollout_is",
        ),
        (
            {
                "rollout__max_staleness": 2,
                "rollout__partial_length": 512,
                "algorithm__rollout_is": "token",
            },
            r"partial_length=512: expected fewer tokens than config\.data\.max_response_length=512",
        ),
        (
            {
                "rollout__max_staleness": 2,
                "algorithm__rollout_is": "token",
                "rollout__multi_turn__environment": "a.py:B",
            },
            r"environment='a\.py:B': expected '' with config\.rollout\.max_staleness=2, whose "
            r"responses continue from step to step; or set config\.rollout\.max_staleness to 0",
        ),
        (
            {"rollout__mesh__devices": 2},
            r"mesh\.devices=2: these devices would decode nothing .*max_staleness to 1 or more$",
        ),
        (
            SEPARATE | {"rollout__engine": "transformers"},
            r"mesh\.devices=2: config\.rollout\.engine='transformers' decodes elsewhere",
        ),
        (
            {"rollout__exact": True, "data__max_response_length": 1},
            r"exact=True: expected config\.data\.max_response_length of at least 2, got 1",
        ),
        (
            {"rollout__exact": True, "rollout__keep": 1, "rollout__n": 2},
            r"rollout\.keep=1: expected None with config\.rollout\.exact=True",
        ),
        (
            {"rollout__exact": True, "mesh__fsdp": 2},
            r"rollout\.exact=True: sums over other axes depend on their sizes",
        ),
        (
            {"algorithm__rollout_is": "token", "rollout__reuse_logprobs": "always"},
            r"config\.rollout\.reuse_logprobs='always'",
        ),
        (
            {"rollout__engine": "builtin"},
            r"config\.rollout\.engine='builtin'.*module:function.*Did you mean 'built-in'",
        ),
        (
            {"rollout__engine": "transformers", "rollout__reuse_logprobs": "always"},
            r"reuse_logprobs='always': config\.rollout\.engine='transformers' rounds differently",
        ),
        (
            {"rollout__engine": "vllm"},
            r"engine='vllm': needs rollout\.vllm\.python or rollout\.url",
        ),
        (
            {"rollout__engine": "sglang", "rollout__vllm__python": "python"},
            r"engine='openai': needs rollout\.url",
        ),
        (
            {"rollout__engine": "openai", "rollout__url": "http://[::1"},
            r"rollout\.url: expected http://HOST:PORT",
        ),
        ({"reward__url": "ftp://host/x"}, r"reward\.url='ftp://host/x': expected http://HOST/PATH"),
        (
            {"reward__url": "http://me:pw@host/?key=x"},
            r"url: the address contains a user name or a password; .*JAX_PPO_REWARD_KEY",
        ),
        (
            {
                "rollout__engine": "vllm",
                "rollout__vllm__python": "p",
                "rollout__vllm__arguments": "--x='a",
            },
            r"rollout\.vllm\.arguments=.*No closing quotation",
        ),
        ({"rollout__url": "http://a:1"}, r"rollout\.url=.*engine='built-in' is not a server"),
        (
            {"rollout__engine": "openai", "rollout__url": "a:1"},
            r"rollout\.url='a:1': expected http://HOST:PORT",
        ),
        (
            {"rollout__engine": "openai", "rollout__url": "http://me:secret@a"},
            r"config\.rollout\.url: the address contains a user name.*JAX_PPO_ROLLOUT_KEY",
        ),
        (
            {
                "rollout__engine": "openai",
                "rollout__url": "http://a",
                "rollout__temperature": 0.5,
                "rollout__top_p": 0.9,
            },
            r"rollout\.temperature=0\.5: servers report log-probs before temperature and filters",
        ),
        (
            {"rollout__engine": "hf", "rollout__mesh__model": 2},
            r"rollout\.mesh\.model=2: config\.rollout\.engine='transformers' does not decode",
        ),
        ({"trainer__logger": "tensorbord"}, r"config\.trainer\.logger='tensorbord'"),
        (
            {"actor__policy_loss": "vanila"},
            r"config\.actor\.policy_loss='vanila'.*Did you mean 'vanilla'",
        ),
        (
            {"critic__ppo_mini_batch_size": 48},
            r"config\.critic\.ppo_mini_batch_size=48: must divide",
        ),
        ({"algorithm__adv_estimator": "grpo"}, r"config\.rollout\.n=1.*adv_estimator='grpo'"),
        (
            {"algorithm__adv_estimator": "reinforce_plus_plus", "trainer__critic_warmup": 2},
            r"critic_warmup=2: there is no critic",
        ),
        (
            {"algorithm__kl_ctrl__type": "adaptive"},
            r"kl_ctrl\.type='adaptive': changes the coefficient",
        ),
        (
            {"reward__process_rewards": True},
            r"process_rewards=True: needs a config\.reward\.function",
        ),
        (
            {"reward__model_input": "chat"},
            r"config\.reward\.model_input='chat': there is no reward model",
        ),
        ({"reward__max_length": 512}, r"config\.reward\.max_length=512: there is no reward model"),
        (
            {"reward__model_path": "x", "reward__max_length": 8},
            r"config\.reward\.max_length=8: expected at least 16",
        ),
        (
            {"reward__model_path": "x", "reward__model_input": "pairs"},
            r"model_input='pairs'.*Did you mean 'pair'",
        ),
        (
            {"model__lora__targets": "q_proj,vproj"},
            r"config\.model\.lora\.targets='q_proj,vproj'.*Did you mean 'v_proj'",
        ),
        (
            {"model__lora__path": "x", "model__lora__rank": 8},
            r"config\.model\.lora\.path='x': determines rank, alpha",
        ),
        (
            {"critic__keep_head": True},
            r"config\.critic\.keep_head=True: needs a config\.critic\.path",
        ),
        (
            {"critic__shared_trunk": True, "critic__path": "x"},
            r"config\.critic\.path='x': a critic that shares the actor's trunk",
        ),
        (
            {"rollout__multi_turn__environment": "Calculator"},
            r"multi_turn\.environment='Calculator': expected module:Class",
        ),
        (
            {"rollout__multi_turn__environment": "a:B", "rollout__multi_turn__url_retries": 3},
            r"url_retries=3: config\.rollout\.multi_turn\.environment='a:B' is not a server",
        ),
        (
            {"rollout__multi_turn__environment": "http://me:secret@host"},
            r"environment: the address contains a user name, a password or a query; set the "
            "environment variable JAX_PPO_ENVIRONMENT_KEY",
        ),
        (
            {
                "rollout__multi_turn__environment": "http://localhost:1",
                "rollout__multi_turn__url_timeout": 60.0,
            },
            r"url_timeout=60\.0: expected less than config\.rollout\.multi_turn\.timeout=60\.0, ",
        ),
        (
            {"distributed__coordinator_address": "a:1", "distributed__num_processes": 2},
            r"process_id=-1: expected at least 0, and less than .*num_processes=2, with",
        ),
        (
            {"rollout__multi_turn__environment": "a:B", "rollout__engine": "c:D"},
            r"multi_turn\.environment='a:B': config\.rollout\.engine='c:D' has no environment",
        ),
        (
            {"rollout__multi_turn__reward": "environment", "reward__function": "a:f"},
            r"multi_turn\.reward='environment': ignores the rewards that config\.reward sets",
        ),
        (
            {"reward__overlong_buffer_len": 513},
            r"overlong_buffer_len=513: expected at most .*max_response_length=512",
        ),
    ],
)
def test_impossible_values_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        validated(**changes)


FLOATS = [option for option in schema.all_options() if option.value_type is float]
INTEGERS = [option for option in schema.all_options() if option.value_type is int]


def nested(name, value):
    """Return {"actor": {"optim": {"lr": value}}} for "actor.optim.lr"."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e39, 1e-40, 10**400], ids="abcdef"
)
def test_no_option_accepts_a_number_that_is_not_finite_in_32_bits(value):
    """Regression: critic.optim.lr=inf, rollout.temperature=inf and reward.fallback_score=nan."""
    assert len(FLOATS) > 40
    for option in FLOATS:
        with pytest.raises(UserError, match=rf"^config\.{option.name}=.*finite number"):
            loading.from_config_dict(nested(option.name, value))


@pytest.mark.parametrize("value", [2**32, -(2**40), 10**5000], ids=("large", "negative", "huge"))
def test_no_option_accepts_an_integer_beyond_32_bits(value):
    """Regression: seed=2**32 was the same as seed=0."""
    for option in INTEGERS:
        with pytest.raises(UserError, match=rf"^config\.{option.name}=.*: expected an integer"):
            loading.from_config_dict(nested(option.name, value))


def test_zero_and_the_largest_numbers_are_accepted():
    config = validated(reward__fallback_score=-3e38, actor__optim__weight_decay=0.0, seed=2**32 - 1)
    assert config.reward.fallback_score == -3e38 and config.actor.optim.weight_decay == 0.0
    assert config.seed == 2**32 - 1


def test_commands_that_do_not_learn_while_they_decode_use_all_devices():
    values = loading.default_config()
    values.data.train_files, values.model.path = "rows.jsonl", "folder"
    values.update_from_flattened_dict({k.replace("__", "."): v for k, v in SEPARATE.items()})
    devices = {
        command: loading.from_config_dict(values, command).rollout.mesh.devices
        for command in ("train", "critic", "plan", "evaluate", "sft")
    }
    assert devices == {"train": 2, "critic": 2, "plan": 2, "evaluate": 0, "sft": 0}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(
        "from jax_ppo.config import default_config\n"
        "def get_config(arg=None):\n"
        "    config = default_config()\n"
        "    config.data.train_files = 'arithmetic:8'\n"
        "    config.experiment_name = arg or 'tiny'\n"
        "    return config\n"
    )
    return path


def test_overrides_and_argument(config_file):
    options, workdir = command_line.read_command_line(
        [
            "train",
            f"--config={config_file}:named",
            "--config.actor.optim.lr=1e-4",
            "--config.rollout.n=2",
            "--config.actor.clip_ratio_high=0.28",
            "--config.data.shuffle=false",
            "--config.algorithm.whiten_rewards",
        ]
    )
    assert (
        options.actor.optim.lr == 1e-4
        and options.rollout.n == 2
        and options.actor.clip_ratio_high == 0.28
    )
    assert options.data.shuffle is False and options.algorithm.whiten_rewards is True
    assert str(workdir) == "output/named"
    arguments = ["train", f"--config={config_file}", "--workdir", "here"]
    assert str(command_line.read_command_line(arguments)[1]) == "here"


def test_only_what_trains_needs_training_data(config_file):
    arguments = [f"--config={config_file}", "--config.data.train_files=", "--config.model.path=x/y"]
    for command in ("evaluate", "plan"):
        options, _ = command_line.read_command_line(["", *arguments], command)
        assert options.data.train_files == ""
    for command in ("train", "sft", "reward_model"):
        with pytest.raises(UserError, match="config.data.train_files='': must be set"):
            command_line.read_command_line(["", *arguments], command)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--config.actor.clip_rato=0.1",
            r"config\.actor\.clip_rato: there is no such option. Did you mean .*clip_ratio\?",
        ),
        ("--config.clip_ratio=0.1", r"Did you mean config\.actor\.clip_ratio\?"),
        ("--config.rollout.n=1.5", r"config\.rollout\.n='1\.5': expected int"),
        ("--config.actor.optim.lr=fast", r"config\.actor\.optim\.lr='fast': expected float"),
        ("--config.data.shuffle=maybe", r"config\.data\.shuffle='maybe': expected true or false"),
        ("--config.algorithm.adv_estimator=GRPO", r"expected .*Did you mean 'grpo'\?"),
        ("--config.critic.path=null", r"config\.critic\.path=null: .*or '' as by default"),
        ("--config.algorithm.rollout_is=None", r"rollout_is=None: .*or 'none' as by default"),
        ("--config.trainer.total_training_steps=null", r"steps=null: .*or unset as by default"),
        ("--config.rollout.n", r"write --config\.rollout\.n=VALUE"),
        ("--confg.rollout.n=2", r"--confg\.rollout\.n: .*Did you mean config\.rollout\.n\?"),
        ("--rollout.n=2", r"--rollout\.n: write --config\.rollout\.n=VALUE"),
        ("--learning_rate=1e-5", r"TRL and OpenRLHF's learning_rate: config\.actor\.optim\.lr"),
        (
            "--config.model.path=['a','b']",
            r"lists are written as one text, --config\.model\.path=a,b",
        ),
        ("rollout.n=2", r"rollout\.n=2: write --config\.rollout\.n=2"),
        ("+data.train_batchsize=4", "Did you mean config.data.train_batch_size"),
        ("actor_rollout_ref.rollout.n=5", "verl's rollout.n: config.rollout.n"),
        ("trainer.nnodes=2", "verl's trainer.nnodes: the launcher starts"),
        ("more.jsonl", "more.jsonl: not an option"),
        ("--workdir", "--workdir: write --workdir=FOLDER"),
        ("--workdir=", "--workdir: write --workdir=FOLDER"),
        ("--workdir=--config.rollout.n=2", "--workdir: write --workdir=FOLDER"),
        ("---config.rollout.n=2", "---config.rollout.n: there is no such option"),
    ],
)
def test_command_line_mistakes(config_file, argument, message):
    with pytest.raises(UserError, match=message):
        command_line.read_command_line(["train", f"--config={config_file}", argument])


@pytest.mark.parametrize(
    "value", ["['console','tensorboard']", "(console, tensorboard)", "console,tensorboard"]
)
def test_a_list_is_written_in_any_form_on_the_command_line(config_file, value):
    arguments = ["train", f"--config={config_file}", f"--config.trainer.logger={value}"]
    assert command_line.read_command_line(arguments)[0].trainer.logger == "console,tensorboard"


def test_a_list_is_a_list_in_python(config_file):
    files = ["a.jsonl", "b.parquet[:100]"]
    config = loading.load_config(
        str(config_file), {"data.train_files": files, "model.path": "some/model"}
    )
    assert config.data.train_files == "a.jsonl,b.parquet[:100]"


def test_all_mistakes_of_a_command_line_are_reported_at_once(config_file):
    arguments = ["--config.actor.clip_rato=0.1", "--config.rollout.n=x", "--rollout.n=2"]
    with pytest.raises(UserError) as refusal:
        command_line.read_command_line(["train", f"--config={config_file}", *arguments])
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3 and lines[0].startswith("config.actor.clip_rato")
    assert lines[1].startswith("error: config.rollout.n='x'") and "--rollout.n" in lines[2]


def test_missing_file_names_the_nearest(config_file):
    with pytest.raises(UserError, match=r"no such file. Did you mean .*tiny\.py"):
        command_line.read_command_line(["train", f"--config={config_file.parent}/tinny.py"])


@pytest.mark.parametrize("name", ["verl.yaml", "config.json"])
def test_a_file_that_is_not_python_names_the_command_that_translates(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=rf"{name}: expected a Python file .*jax_ppo\.translate"):
        command_line.read_command_line(["train", f"--config={tmp_path / name}"])


def test_a_mistake_costs_no_heavy_import(config_file):
    code = (
        "import sys\nfrom jax_ppo.train import main\n"
        f"try: main(['train', '--config={config_file}', '--config.actor.clip_rato=1'])\n"
        "except SystemExit as error: print(error)\n"
        "print(sorted({'jax', 'flax', 'transformers', 'orbax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "config.actor.clip_ratio" in done.stdout


def test_all_options_are_written_and_those_that_were_set_are_printed(config_file, tmp_path, capsys):
    arguments = ["train", f"--config={config_file}", "--config.data.instruction=Think first."]
    options, _ = command_line.read_command_line(arguments)
    command_line.write_config(dataclasses.asdict(options), tmp_path / "work")
    typed = command_line.typed_options(arguments)
    command_line.print_set_options(dataclasses.asdict(options), typed)
    written = json.loads((tmp_path / "work" / "config.json").read_text())
    assert loading.from_config_dict(written) == options
    assert written["actor"]["clip_ratio"] == 0.2, "defaults are written, too"
    printed = capsys.readouterr().out
    first, rest = printed.split("\n", 1)
    assert first == "options on the command line: data.instruction='Think first.'"
    others = [
        option.name
        for option in schema.all_options()
        if option_value(options, option.name) != option.default
        and option.name != "data.instruction"
    ]
    assert len(others) > 1
    assert rest == f"{len(others)} other options not at the default, see config.json\n"
    assert command_line.typed_options(["", "--config.trainer.export", "--workdir=a"]) == {
        "trainer.export"
    }
    command_line.print_set_options(dataclasses.asdict(schema.Config()), ())
    assert capsys.readouterr().out == "0 options not at the default, see config.json\n"


def test_a_reader_of_the_table_may_leave():
    """`python -m jax_ppo.config | head`: no traceback."""
    command, pipe = [sys.executable, "-m", "jax_ppo.config"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as table:
        table.stdout.close()
        assert table.stderr.read() == "" and table.wait() == 0


@pytest.mark.parametrize("output", ["closed pipe", "full disk"])
def test_nothing_that_is_printed_ends_a_process(output):
    program = "from jax_ppo.errors import print_any_text\nprint_any_text()\n"
    program += "for _ in range(3):\n    print('x' * 100_000, flush=True)\n"
    program += "import sys; print('end', file=sys.stderr)"
    with open("/dev/full", "w") as full:
        stdout = full if output == "full disk" else subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, text=True
        ) as process:
            if process.stdout:
                process.stdout.close()
            lost = "warning: the standard output is lost: [Errno 28] No space left on device\n"
            expected = (lost if output == "full disk" else "") + "end\n"
            assert process.stderr.read() == expected and process.wait() == 0


def test_an_option_of_the_file_can_be_unset():
    """Regression: epochs on the command line did nothing where the file sets steps."""
    epochs, steps = "--config.trainer.total_epochs=2", "--config.trainer.total_training_steps"
    command = ["train", "--config=arithmetic", epochs]
    (note,) = train_notes(command_line.read_command_line(command)[0])
    assert note.startswith("config.trainer.total_epochs=2 has no effect with the other options")
    config, _ = command_line.read_command_line([*command, f"{steps}=unset"])
    assert config.trainer.total_training_steps is None and train_notes(config) == []
    both = command_line.read_command_line([*command, f"{steps}=unset", f"{steps}=7"])
    assert both[0].trainer.total_training_steps == 7, "the last one counts"
    # Steps on the command line replace a file's epochs without a note, unless epochs stand there.
    command = ["train", "--config=gsm8k", f"{steps}=3"]
    for config in (
        command_line.read_command_line(command)[0],
        loading.load_config("gsm8k", trainer__total_training_steps=3),
    ):
        assert config.trainer.total_epochs == 1 and train_notes(config) == []
    assert len(train_notes(command_line.read_command_line([*command, epochs])[0])) == 1
    command = ["train", "--config=arithmetic", epochs]
    with pytest.raises(UserError, match="total_epochs='unset': expected int"):
        command_line.read_command_line([*command[:2], "--config.trainer.total_epochs=unset"])


def test_verls_names_of_estimators_are_accepted():
    assert validated(actor__kl_loss_type="low_var_kl+").actor.kl_loss_type == "k3+"
    assert validated(algorithm__kl_penalty="mse").algorithm.kl_penalty == "k2"


def test_every_option_is_read():
    """Its name occurs outside jax_ppo/config/, or in a property of Config."""
    package = pathlib.Path(loading.__file__).parents[1]
    code = "".join(
        path.read_text() for path in package.rglob("*.py") if path.parent.name != "config"
    )
    properties = inspect.getsource(schema.Config)
    for option in schema.all_options():
        name = option.name.rpartition(".")[2]
        assert re.search(rf"[.\"]{name}\b", code + properties), option.name


def test_load_config_overrides_by_keyword_and_by_dotted_name(config_file):
    config = loading.load_config(
        f"{config_file}:named", {"actor.optim.lr": 1e-4}, rollout__n=2, actor__clip_ratio_high=0.28
    )
    assert config.experiment_name == "named"
    assert config.actor.optim.lr == 1e-4
    assert (config.rollout.n, config.actor.clip_ratio_high) == (2, 0.28)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"actor__clip_rato": 0.1}, r"config\.actor\.clip_rato: .*Did you mean .*clip_ratio\?"),
        ((), {"rollout__n": "four"}, r"config\.rollout\.n='four': expected int"),
        ((), {"rollout": 3}, r"config\.rollout: there is no such option"),
        (("arithmetc",), {}, r"--config=arithmetc: .*Did you mean arithmetic\?"),
        ((), {"command": "sftt"}, r"command='sftt': .*Did you mean 'sft'"),
        ((), {"command": "sft"}, r"config\.data\.train_files='': must be set"),
        ((), {"reward__function": len}, r"pass a function as train\(config, workdir, reward=f\)"),
        ((), {"reward__function": "__main__:f"}, r"main__:f': .* reward=f\), or save .*FILE.py:f"),
        ((), {"reward__terms": "__main__:f:1"}, r"main__:f:1': .* workdir, reward=f\), or save"),
        ((), {"data__train_files": {"a": [1], "b": [2]}}, r"got a dict of a, b"),
        ((), {"data__val_files": pathlib.Path("a")}, "expected a text, a list of .* a PosixPath"),
        ((), {"data__train_files": iter([{}])}, "list of dicts, a DataFrame or .* list_iterator"),
        ((), {"data__val_files": [{"a": {1}}]}, r"val_files: a row .* JSON: a set is neither"),
    ],
)
def test_load_config_reports_mistakes_like_the_command_line(arguments, options, message):
    with pytest.raises(UserError, match=message):
        loading.load_config(*arguments, **options)


def test_a_config_without_the_equals_sign_is_named():
    with pytest.raises(UserError, match="--config: write --config=NAME"):
        command_line.read_command_line(["train", "--config", "arithmetic"])
