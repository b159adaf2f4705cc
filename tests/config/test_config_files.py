"""`--config` takes a path, or the name of a shipped configuration from any folder."""

import sys
from pathlib import Path

import pytest

from jax_ppo.config import command_line, config_files, loading, plugins
from jax_ppo.config.option import option_value
from jax_ppo.errors import UserError


def test_a_bare_name_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--config=arithmetic", "--config.rollout.n=2"]
    config, workdir = command_line.read_command_line(arguments)
    assert config.data.train_files == "arithmetic:8192"
    assert config.rollout.n == 2
    assert workdir == Path("output/arithmetic")


def test_a_path_and_the_name_mean_the_same_in_a_checkout(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    by_path = command_line.read_command_line(["train", "--config=configs/arithmetic.py"])
    assert by_path == command_line.read_command_line(["train", "--config=arithmetic"])


def test_a_file_of_the_users_own_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("arithmetic").write_text("")
    assert config_files.find_config_file("arithmetic:x") == (Path("arithmetic"), "x")


def test_an_argument_that_a_file_does_not_take_is_refused():
    """Regression: the line was Python's, of `get_config() takes 0 positional arguments`."""
    with pytest.raises(UserError) as caught:
        loading.load_config("arithmetic:smok")
    assert str(caught.value) == "--config=arithmetic:smok: expected arithmetic or arithmetic:smoke"


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        ("arithmetc", "arithmetic"),
        ("configs/gsm8.py", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("nowhere/hh_rlhf_sf.py:x", "hh_rlhf_sft"),
    ],
)
def test_a_wrong_name_gets_the_nearest(value, nearest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = rf"--config={value}: there is no such file. Did you mean {nearest}\?"
    with pytest.raises(UserError, match=message):
        command_line.read_command_line(["train", f"--config={value}"])


def test_a_file_without_get_config_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UserError, match="empty.py: the file has no function get_config"):
        loading.load_config(str(tmp_path / "empty.py"))


def read_command(value):
    """Return the configuration as the three commands read it."""
    return command_line.read_command_line(["train", f"--config={value}"])[0]


@pytest.mark.parametrize("read", [read_command, loading.load_config])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef get_config(:\n", "file.py, line 2: SyntaxError: invalid syntax"),
        ("\nimport nothing_of_this_name\n", "line 2: ModuleNotFoundError: No module named"),
        ("def get_config():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(0)\n", "line 2: SystemExit: 0"),
        ("def get_config():\n    raise ValueError('a\\nb')\n", "line 2: ValueError: a b$"),
        (
            "def get_config():\n    return [1]\n",
            r"get_config returned \[1\]; expected a ConfigDict",
        ),
        ("x = '\x00'\n", "null bytes"),
        ("def get_config():\n    return {'rollout.n': 2}\n", "the key rollout.n contains one"),
    ],
)
def test_an_error_of_the_file_is_one_line_with_the_place(read, source, message, tmp_path):
    file = tmp_path / "file.py"
    file.write_text(source)
    with pytest.raises(UserError, match=f"--config={file}: .*{message}") as error:
        read(file if read is read_command else str(file))
    assert "\n" not in str(error.value)


def test_a_file_sets_options_as_the_command_line_does(tmp_path):
    """Regression: ml_collections hid the nearest name, and refused lists of files."""
    file = tmp_path / "file.py"
    lines = (
        "import jax_ppo.config\ndef get_config():\n    c = jax_ppo.config.default_config()\n    c."
    )
    file.write_text(f"{lines}data.train_files = ['arithmetic:8', 'sums:9']\n    return c\n")
    assert loading.load_config(str(file)).data.train_files == "arithmetic:8,sums:9"
    file.write_text(f"{lines}actor.clip_ration = 0.1\n    return c\n")
    with pytest.raises(UserError, match="^config.actor.clip_ration: .* config.actor.clip_ratio?"):
        loading.load_config(str(file))


def test_a_plain_dict_is_a_configuration_too_and_its_missing_options_can_be_set(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def get_config():\n    return {'data': {'train_files': 'arithmetic:8'}}\n")
    overrides = {"actor.ppo_epochs": 3, "reward.workers": 2}
    by_flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    config, _ = command_line.read_command_line(["train", f"--config={file}", *by_flags])
    assert config == loading.load_config(str(file), overrides)
    assert (config.actor.ppo_epochs, config.reward.workers) == (3, 2)
    with pytest.raises(UserError, match="config.reward.workers='2': expected int"):
        loading.load_config(str(file), {"reward.workers": "2"})


@pytest.mark.parametrize(
    ("returned", "override", "message"),
    [
        ("{'trainer': 5}", "trainer.total_training_steps", "config.trainer: expected a section of"),
        ("FrozenConfigDict({})", "rollout.n", ""),
        ("{'rollout': {'n': required_placeholder(int)}}", "rollout.n", ""),
        ("{'rollout': {'n': required_placeholder(int)}}", "seed", "config.rollout.n: None value"),
        ("{'trainer': {'total_epochs': '3'}}", "trainer.total_training_steps", ""),
    ],
)
def test_an_override_meets_what_a_file_has_in_its_place(returned, override, message, tmp_path):
    """Regression: each ended in a traceback."""
    file = tmp_path / "file.py"
    file.write_text(
        "from ml_collections.config_dict import FrozenConfigDict, required_placeholder\n"
        f"def get_config():\n    return {returned}\n"
    )
    words = ["train", f"--config={file}", f"--config.{override}=2"]
    words.append("--config.data.train_files=arithmetic:8")
    if message:
        with pytest.raises(UserError, match=message):
            command_line.read_command_line(words)
    else:
        config, _ = command_line.read_command_line(words)
        assert option_value(config, override) == 2


def test_the_smoke_form_replaces_data_and_models_with_what_belongs_to_them(tmp_path):
    file = tmp_path / "file.py"
    options = {
        "data": {"train_files": ["a.json", "b.json"], "prompt_key": "text"},
        "model": {"path": "m", "lora": {"path": "adapters"}},
        "critic": {"path": "c", "keep_head": True},
        "reference": {"path": "r"},
        "teacher": {"path": "t", "loss_coef": 0.5},
        "rollout": {"n": 16, "keep": 8},
        "reward": {"model_path": "rm", "max_length": 64, "clip": 5.0},
    }
    file.write_text(f"def get_config():\n    return {options}\n")
    smoke = loading.load_config(f"{file}:smoke")
    assert (smoke.data.train_files, smoke.data.prompt_key) == ("arithmetic:64", "")
    models = (smoke.model.lora.path, smoke.reference.path, smoke.teacher.path)
    assert models == ("", "", "") and smoke.has_adapters
    assert (smoke.reward.max_length, smoke.reward.clip, smoke.rollout.keep) == (None, 5.0, 2)


def test_a_file_imports_the_module_beside_it_and_not_that_of_another_folder(tmp_path):
    for size in (3, 5):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "jax_ppo_test_sizes.py").write_text(f"EPOCHS = {size}\n")
        (folder / "file.py").write_text(
            "from __future__ import annotations\n"  # dataclasses look their module up
            "import dataclasses\n"
            "@dataclasses.dataclass\nclass Part:\n    size: int = 1\n"
            "def get_config():\n"
            "    from jax_ppo_test_sizes import EPOCHS\n"
            "    actor = {'ppo_epochs': EPOCHS}\n"
            "    return {'data': {'train_files': 'arithmetic:8'}, 'actor': actor}\n"
        )
        before = list(sys.path)
        assert loading.load_config(str(folder / "file.py")).actor.ppo_epochs == size
        assert sys.path == before


def test_a_function_of_a_file_imports_the_module_beside_it(tmp_path):
    (tmp_path / "jax_ppo_test_early.py").write_text("VALUE = 1\n")
    (tmp_path / "jax_ppo_test_late.py").write_text("VALUE = 2\n")
    (tmp_path / "rewards.py").write_text(
        "from jax_ppo_test_early import VALUE\n"
        "def score(text):\n"
        "    import jax_ppo_test_late\n"
        "    return VALUE + jax_ppo_test_late.VALUE\n"
    )
    name = f"{tmp_path}/rewards.py:score"
    assert plugins.load_plugin(name, "reward.function", ("text",), by_name=True)(text="") == 3
