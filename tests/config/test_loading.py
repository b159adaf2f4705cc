"""A wrong option fails before heavy imports, with its name, value and what was expected."""

import dataclasses
import inspect
import json
import math
import pathlib
import re
import subprocess
import sys
import types

import pytest

from jax_ppo.config import command_line, loading, schema
from jax_ppo.config.option import option_value
from jax_ppo.config.validation import train_notes
from jax_ppo.errors import UserError


def validated(changes, command="train"):
    """Return a valid config with changes by dotted names."""
    values = loading.default_config()
    values.data.train_files = "arithmetic:8"
    values.update_from_flattened_dict(changes)
    return loading.from_config_dict(values, command)


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
    assert hash(validated({})) == hash(validated({}))


ADAPTIVE = {"algorithm.kl_ctrl.type": "adaptive"}
CONTINUED = {"rollout.max_staleness": 2, "algorithm.rollout_is": "token"}
SERVER = {"rollout.engine": "openai", "rollout.url": "http://a"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"actor.clip_ratio": -1.0}, "expected more than 0"),
        ({"algorithm.gamma": 2.0}, "expected at most 1"),
        ({"reward.max_length": 8, "reward.model_path": "x"}, "expected at least 16"),
        ({"mesh.model": 0}, "expected -1 or at least 1"),
        ({"actor.clip_ratio_c": 0.5}, "must be above 1; 0 turns it off"),
        ({"actor.loss_agg_mode": "token_mean"}, "Did you mean 'token-mean'"),
        ({"actor.policy_loss": "vanila"}, "Did you mean 'vanilla'"),
        ({"rollout.engine": "builtin"}, "or module:function. Did you mean 'built-in'"),
        ({"trainer.logger": "tensorbord"}, "Did you mean 'tensorboard'"),
        ({"model.lora.targets": "q_proj,vproj"}, "Did you mean 'v_proj'"),
        ({"rollout.multi_turn.environment": "Calculator"}, "expected module:Class"),
        ({"data.train_files": ""}, "must be set"),
        ({"model.path": "", "data.train_files": "x.jsonl"}, "must be set"),
        (
            {"actor.ppo_mini_batch_size": 64, "data.train_batch_size": 48},
            "must divide config.data.train_batch_size=48; the nearest divisor is 48",
        ),
        ({"critic.ppo_mini_batch_size": 48}, "must divide"),
        ({"packing.row_length": 100}, "1024 tokens"),
        (
            {"packing.row_length": 1028, "mesh.context": 4},
            "expected a multiple of twice config.mesh.context=4",
        ),
        (
            {"mesh.fsdp": -1},
            "only one of config.mesh.model=1, fsdp=-1 and data=-1 can be -1; set the others",
        ),
        ({"mesh.model": -1}, "only one of config.mesh.model=-1, fsdp=1 and data=-1 can be -1"),
        ({"actor.router_aux_loss_coef": 0.1, "mesh.context": 2}, "config.mesh.context=2"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.use_reference": False}, "the reference"),
        (ADAPTIVE, "changes the coefficient"),
        (
            ADAPTIVE | {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0},
            "multiplies config.algorithm.kl_ctrl.kl_coef=0",
        ),
        ({"rollout.n": 1, "algorithm.adv_estimator": "grpo"}, "algorithm.adv_estimator='grpo'"),
        (
            {"trainer.critic_warmup": 2, "algorithm.adv_estimator": "reinforce_plus_plus"},
            "there is no critic with config.algorithm.adv_estimator='reinforce_plus_plus'",
        ),
        (
            {"algorithm.bootstrap_truncated": True, "algorithm.adv_estimator": "turn_gae"},
            "'turn_gae' has a critic that learns values only where",
        ),
        ({"critic.keep_head": True}, "needs a config.critic.path"),
        (
            {"critic.path": "x", "critic.shared_trunk": True},
            "a critic that shares the actor's trunk",
        ),
        ({"model.lora.path": "x", "model.lora.rank": 8}, "determines rank, alpha"),
        ({"rollout.max_staleness": 1}, "config.algorithm.rollout_is"),
        (
            {"rollout.partial_length": 512} | CONTINUED,
            "expected fewer tokens than config.data.max_response_length=512",
        ),
        (
            {"rollout.multi_turn.environment": "a.py:B"} | CONTINUED,
            "expected '' with config.rollout.max_staleness=2, whose responses continue from step",
        ),
        ({"rollout.mesh.devices": 2}, "these devices would decode nothing"),
        (
            {"rollout.exact": True, "data.max_response_length": 1},
            "expected config.data.max_response_length of at least 2, got 1",
        ),
        (
            {"rollout.keep": 1, "rollout.n": 2, "rollout.exact": True},
            "expected None with config.rollout.exact=True",
        ),
        ({"rollout.exact": True, "mesh.fsdp": 2}, "sums over other axes depend on their sizes"),
        (
            {"rollout.reuse_logprobs": "always", "algorithm.rollout_is": "token"},
            "leaves config.algorithm.rollout_is='token' no other log-probs",
        ),
        (
            {"rollout.reuse_logprobs": "always", "rollout.engine": "transformers"},
            "config.rollout.engine='transformers' rounds differently",
        ),
        (
            {"rollout.mesh.model": 2, "rollout.engine": "hf"},
            "config.rollout.engine='transformers' does not decode",
        ),
        (
            {"rollout.multi_turn.environment": "a:B", "rollout.engine": "c:D"},
            "config.rollout.engine='c:D' has no environment",
        ),
        ({"rollout.engine": "vllm"}, "needs rollout.vllm.python or rollout.url"),
        ({"rollout.engine": "openai", "rollout.vllm.python": "python"}, "needs rollout.url"),
        ({"rollout.url": "http://a:1"}, "engine='built-in' is not a server"),
        (
            {
                "rollout.vllm.arguments": "--x='a",
                "rollout.vllm.python": "p",
                "rollout.engine": "vllm",
            },
            "No closing quotation",
        ),
        (
            {"rollout.temperature": 0.5, "rollout.top_p": 0.9} | SERVER,
            "servers report log-probs before temperature and filters",
        ),
        ({"reward.process_rewards": True}, "needs a config.reward.function"),
        (
            {"rollout.multi_turn.reward": "environment", "reward.function": "a:f"},
            "ignores the rewards that config.reward sets",
        ),
        (
            {"rollout.multi_turn.url_retries": 3, "rollout.multi_turn.environment": "a:B"},
            "config.rollout.multi_turn.environment='a:B' is not a server",
        ),
        (
            {
                "rollout.multi_turn.url_timeout": 60.0,
                "rollout.multi_turn.environment": "http://localhost:1",
            },
            "expected less than config.rollout.multi_turn.timeout=60.0, ",
        ),
        (
            {
                "distributed.process_id": -1,
                "distributed.coordinator_address": "a:1",
                "distributed.num_processes": 2,
            },
            "expected at least 0, and less than config.distributed.num_processes=2",
        ),
        (
            {"reward.overlong_buffer_len": 513},
            "expected at most config.data.max_response_length=512",
        ),
    ],
)
def test_impossible_values_are_named(changes, expected):
    """The first of the changed options is named with its value."""
    name, value = next(iter(changes.items()))
    with pytest.raises(UserError) as refusal:
        validated(changes)
    assert str(refusal.value).startswith(f"config.{name}={value!r}: ")
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("option", "url", "expected"),
    [
        ("rollout.url", "http://[::1", ": expected http://HOST:PORT"),
        ("rollout.url", "a:1", "='a:1': expected http://HOST:PORT"),
        ("rollout.url", "http://a:1/v1/", "='http://a:1/v1/': expected the address .*without /v1"),
        (
            "rollout.url",
            "http://secret@a",
            ": the address contains a user name.*JAX_PPO_ROLLOUT_KEY",
        ),
        ("reward.url", "ftp://host/x", "='ftp://host/x': expected http://HOST/PATH"),
        (
            "reward.url",
            "http://host/?v=2&api_key=x",
            ": the address contains a user name, a password or a key in its query; .*REWARD_KEY",
        ),
        (
            "rollout.multi_turn.environment",
            "http://me:secret@host",
            ": the address contains a user name, a password or a query; .*JAX_PPO_ENVIRONMENT_KEY",
        ),
    ],
)
def test_an_address_that_is_none_or_has_secrets_is_refused_without_them(option, url, expected):
    with pytest.raises(UserError, match=f"^config.{option}{expected}"):
        validated((SERVER if option == "rollout.url" else {}) | {option: url})


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
    config = validated(
        {"reward.fallback_score": -3e38, "actor.optim.weight_decay": 0.0, "seed": 2**32 - 1}
    )
    assert config.reward.fallback_score == -3e38 and config.actor.optim.weight_decay == 0.0
    assert config.seed == 2**32 - 1


def test_commands_that_do_not_learn_while_they_decode_use_all_devices():
    changes = {"rollout.max_staleness": 1, "rollout.mesh.devices": 2, "model.path": "folder"}
    changes["algorithm.rollout_is"] = "token"
    devices = {
        command: validated(changes, command).rollout.mesh.devices
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


def test_overrides_and_argument(config_file, monkeypatch):
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
    arguments = ["train", f"--config={config_file}", "--workdir", "~/here"]
    assert command_line.read_command_line(arguments)[1] == pathlib.Path.home() / "here"
    monkeypatch.setitem(sys.modules, "gcsfs", types.ModuleType("gcsfs"))  # which buckets need
    assert command_line.read_workdir("gs://bucket//runs///a") == "gs://bucket/runs/a"


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
        ("rollout.n=2", r"rollout\.n=2: write --config\.rollout\.n=2"),
        ("+data.train_batchsize=4", "Did you mean config.data.train_batch_size"),
        ("actor_rollout_ref.rollout.n=5", "verl's rollout.n: config.rollout.n"),
        ("trainer.nnodes=2", "verl's trainer.nnodes: the launcher starts"),
        ("more.jsonl", "more.jsonl: not an option"),
        ("--config", "--config: write --config=NAME"),
        ("--config=~nouser/x.py", "^--config=.*not a usable path"),
        ("--workdirs=x", "^--workdirs: expected --config, --config.NAME or --workdir$"),
        ("--workdir", "--workdir: write --workdir=FOLDER"),
        ("--workdir=lr[1]", r"/lr\[1\]': checkpoints below a folder with '\[' in its name cannot"),
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
    arguments = ["train", f"--config={config_file}", "--config.data.instruction=[Think first.]"]
    options, _ = command_line.read_command_line(arguments)
    command_line.write_config(dataclasses.asdict(options), tmp_path / "work")
    _, _, typed = command_line.read_arguments(arguments[1:])
    command_line.print_set_options(dataclasses.asdict(options), typed)
    written = json.loads((tmp_path / "work" / "config.json").read_text())
    assert loading.from_config_dict(written) == options
    assert written["actor"]["clip_ratio"] == 0.2, "defaults are written, too"
    printed = capsys.readouterr().out
    first, rest = printed.split("\n", 1)
    assert first == "options on the command line: data.instruction='[Think first.]'"
    others = [
        option.name
        for option in schema.all_options()
        if option_value(options, option.name) != option.default
        and option.name != "data.instruction"
    ]
    assert len(others) > 1
    assert rest == f"{len(others)} other options not at the default, see config.json\n"
    words = ["--config.trainer.export", "--workdir=a"]
    assert command_line.read_arguments(words) == ("", "a", {"trainer.export": True})
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


def test_names_of_other_frameworks_are_accepted():
    assert validated({"actor.kl_loss_type": "low_var_kl+"}).actor.kl_loss_type == "k3+"
    assert validated({"algorithm.kl_penalty": "mse"}).algorithm.kl_penalty == "k2"
    assert validated(SERVER | {"rollout.engine": "sglang"}).rollout.engine == "openai"


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
