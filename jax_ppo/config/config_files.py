"""Find configuration files by path or by the name of a shipped one, and call their `get_config`.

The wheel ships the files of the repository's configs/ folder as jax_ppo/configs/, and the table of
metrics as jax_ppo/docs/metrics.md (see setup.py). A checkout, and an editable installation of one,
uses the folders themselves.
"""

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from jax_ppo.config.plugins import folder_importable
from jax_ppo.errors import UserError, nearest_name, shorten
from jax_ppo.storage.local_files import expand_local_path

if TYPE_CHECKING:
    import ml_collections

_PACKAGE = Path(__file__).resolve().parents[1]

SMOKE = "smoke"  # the argument that every file takes
_SMOKE_BATCH = 8  # prompts
_SMOKE_RESPONSE = 24  # tokens
_SCORE_SHAPING = ["normalize", "clip", "missing_eos_penalty", "overlong_buffer_len"]
_SCORE_SHAPING += ["overlong_penalty_factor", "length_penalty"]


def shipped_folder(name: str = "configs") -> Path:
    """Return a folder of the repository that the wheel ships, by default the configurations."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations, sorted."""
    return sorted(path.stem for path in shipped_folder().glob("[!_]*.py"))


def find_config_file(value: str) -> tuple[Path, str]:
    """Return the file that `FILE[:ARG]` names, and the argument for its `get_config`.

    FILE is a path, which takes precedence, or the name of a shipped configuration; `smoke` works
    for any file (`shrink`). Raise `UserError` with the nearest name if there is no such file.
    """
    text, _, argument = value.partition(":")
    path = expand_local_path(text, "--config")
    if path.is_file():
        return path, argument
    # A bare word can only be a shipped name; anything else is meant as a path.
    is_name = path.parent == Path() and path.suffix == ""
    if is_name and text in shipped_names():
        return shipped_folder() / f"{text}.py", argument
    # With a suffix the user meant a file, otherwise a name.
    siblings = [str(file) for file in path.parent.glob("*.py")] if path.suffix else []
    shipped = shipped_names()
    nearest = nearest_name(str(path), siblings) or nearest_name(path.stem, shipped)
    hint = nearest or (siblings or shipped)[0]
    raise UserError(f"--config={value}: there is no such file. Did you mean {hint}?")


def call_get_config(value: str) -> "ml_collections.ConfigDict":
    """Return the configuration that a value of `--config` names; of `:smoke`, not yet shrunk.

    Raise `UserError`, which names the line, if there is no such file or `get_config`, or it raised.
    """
    path, argument = find_config_file(value)
    spec = importlib.util.spec_from_file_location(f"jax_ppo_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"--config={value}: expected a Python file or the name of a shipped configuration; "
            "`python -m jax_ppo.translate` reads commands of verl, TRL and OpenRLHF"
        )
    module = importlib.util.module_from_spec(spec)
    modules = set(sys.modules)
    sys.modules[spec.name] = module  # dataclasses in it look themselves up there
    try:
        with folder_importable(path.parent):
            spec.loader.exec_module(module)
            if not callable(getattr(module, "get_config", None)):
                raise UserError(f"--config={value}: the file has no function get_config")
            given = () if argument in ("", SMOKE) else (argument,)
            if given and not inspect.signature(module.get_config).parameters:
                name = value.removesuffix(f":{argument}")
                raise UserError(f"--config={value}: expected {name} or {name}:smoke")
            config = module.get_config(*given)
        return _as_config_dict(config, value)
    except UserError:
        raise
    # Otherwise a file that ends the process would look like a completed run.
    except (Exception, SystemExit) as error:
        raise UserError(f"--config={value}: {_describe_error(error, spec.origin)}") from error
    finally:
        # A file elsewhere may import another module of the same name.
        for name in set(sys.modules) - modules:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin and Path(origin).parent == path.parent.resolve():
                del sys.modules[name]


def _as_config_dict(config: object, value: str) -> "ml_collections.ConfigDict":
    import ml_collections

    if isinstance(config, dict | ml_collections.FrozenConfigDict):
        return ml_collections.ConfigDict(config)
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"--config={value}: get_config returned {shorten(repr(config))}; expected a ConfigDict"
        )
    return config


def _describe_error(error: BaseException, file: str | None) -> str:
    """Return the line of a configuration file, the type and the text of an exception."""
    location, text = "", str(error)
    if isinstance(error, SyntaxError) and error.filename:
        location, text = f"{error.filename}, line {error.lineno}: ", error.msg
    else:  # the file's own line, not that of a library that it called
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                location = f"{file}, line {frame.lineno}: "
    text = shorten(" ".join(text.split()), width=300)
    return f"{location}{type(error).__name__}: {text}".removesuffix(": ")


def shrink(config: "ml_collections.ConfigDict", defaults: "ml_collections.ConfigDict") -> None:
    """Make a configuration, complete and valid, its smoke form: its algorithm for two cores.

    Models, data and sizes are replaced by those of the small model in the package.
    """
    config.experiment_name = f"{config.experiment_name}-smoke"
    mini_batches = max(1, config.data.train_batch_size // config.actor.ppo_mini_batch_size)
    config.data = defaults.data
    config.data.update(
        train_files="arithmetic:64",
        val_files="arithmetic:16:heldout",
        train_batch_size=_SMOKE_BATCH,
        val_batch_size=16,
        max_prompt_length=48,
        max_response_length=_SMOKE_RESPONSE,
    )
    config.actor.ppo_mini_batch_size = max(1, _SMOKE_BATCH // mini_batches)
    if config.model.lora.path:
        config.model.lora.update(path="", rank=8)
    config.model.update(path="", tokenizer_path="", dtype="float32")
    config.critic.update(path="", keep_head=None, router_aux_loss_coef=0.0)
    config.actor.update(router_aux_loss_coef=0.0, router_replay=defaults.actor.router_replay)
    config.reference.path = ""
    config.teacher, config.score = defaults.teacher, defaults.score
    # The built-in rule of the problems replaces any other reward, but not what shapes scores.
    shaping = {name: config.reward[name] for name in _SCORE_SHAPING}
    config.reward = defaults.reward
    config.reward.update(shaping)
    config.reward.overlong_buffer_len = min(config.reward.overlong_buffer_len, _SMOKE_RESPONSE // 3)
    config.rollout.n = min(config.rollout.n, 4)
    config.rollout.keep = config.rollout.keep and min(config.rollout.keep, 2)
    config.mesh = defaults.mesh
    config.rollout.mesh = defaults.rollout.mesh
    config.packing = defaults.packing
    config.trainer.update(total_training_steps=4, test_freq=2, save_freq=0, export=False)
