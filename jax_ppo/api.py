"""The Python API: the commands as functions; load a policy, sample from it."""

import dataclasses
import html
import inspect
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo import command as commands
from jax_ppo.config import command_line, loading, schema
from jax_ppo.config.schema import Config, Reward, replace_options
from jax_ppo.data import chat_templates, prompt_batches
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.files import require_text
from jax_ppo.data.messages import parse_prompt
from jax_ppo.data.tokenizer import token_bytes
from jax_ppo.errors import UserError
from jax_ppo.models import heads, rope
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.model_folders import resolve_model_folder
from jax_ppo.models.transformer import Transformer
from jax_ppo.registries import keep_in_memory
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.run import data_check
from jax_ppo.runtime import backends, meshes, placement, sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.sampler.text_search import TextSearch, search_for
from jax_ppo.storage import remote
from jax_ppo.storage.local_files import expand_local_path
from jax_ppo.training.networks import Folders
from jax_ppo.training.roles import read_networks
from jax_ppo.types import Prompts

Workdir = str | Path | None
Function = Callable[..., Any] | None
Prompt = str | Sequence[dict[str, str]]  # text, or the messages of a chat

# Of an evaluation, beside `figures`; and what only summary.json has.
_MEANS = ("step", "accuracy", "reward_mean", "response_length")
_IN_FILE_ALONE = ("experiment_name", "training", "devices", "mesh", "compilations", "versions")


class RunResult(dict[str, Any]):
    """The main entries of a run's summary.json, by name; a notebook shows the run's report.

    Of `evaluations`, a list of dicts, all but step, accuracy, reward_mean and response_length are
    in `figures`.
    """

    def __init__(self, summary: dict[str, Any], workdir: str | Path, folder: Path) -> None:
        """Take the summary of a run, its work directory, and the local folder of its files."""
        super().__init__((name, x) for name, x in summary.items() if name not in _IN_FILE_ALONE)
        if "evaluations" in self:
            self["evaluations"] = [
                {name: means[name] for name in _MEANS}
                | {"figures": {name: x for name, x in means.items() if name not in _MEANS}}
                for means in summary["evaluations"]
            ]
        self.workdir = str(workdir)
        self._folder = folder

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Return the columns of training_metrics.csv, a value per step, NaN where it has none."""
        rows = read_metrics_csv(self._folder / "training_metrics.csv")
        return {name: [float(row[name] or math.nan) for row in rows] for name in (*rows, {})[0]}

    def _repr_html_(self) -> str:
        report = (self._folder / "report.html").absolute()
        source = f'src="{html.escape(os.path.relpath(report))}"'
        # Jupyter serves what is below the notebook's folder; others show what is in the output.
        if Path.cwd() not in report.parents or "google.colab" in sys.modules:
            source = f'srcdoc="{html.escape(report.read_text(encoding="utf-8"))}"'
        path = html.escape(f"{self.workdir}/report.html")
        return f'{path}<br><iframe {source} width="100%" height="700"></iframe>'


def train(config: Config, workdir: Workdir = None, *, reward: Function = None) -> RunResult:
    """Train with PPO, as `python -m jax_ppo.train` does.

    Args:
      config: the options, from `load_config`.
      workdir: folder or gs:// address for everything that the run writes; `None`:
        output/EXPERIMENT_NAME. A run resumes from the newest checkpoint in it.
      reward: a function as config.reward.function names one, in place of it. It is called in a
        thread of this process, which a time limit cannot end.

    Raises:
      UserError: options or input files are invalid; the message names the option.
      KeyboardInterrupt: Ctrl-C stopped the run; during training, after the step was saved.
      SystemExit: SIGTERM stopped the run in the same way; the code is 143.
    """
    return _run("train", config, workdir, reward)


def evaluate(config: Config, workdir: Workdir = None, *, reward: Function = None) -> RunResult:
    """Evaluate config.model.path, as `python -m jax_ppo.evaluate` does; otherwise as `train`."""
    return _run("evaluate", config, workdir, reward)


def score(config: Config, workdir: Workdir = None, *, reward: Function = None) -> RunResult:
    """Score config.score.file, as `python -m jax_ppo.score` does; otherwise as `train`."""
    return _run("score", config, workdir, reward)


def check(config: Config, *, reward: Function = None) -> list[str]:
    """Print what `python -m jax_ppo.check` prints, and return the problems.

    Raise `UserError` if the data cannot be read.
    """
    report = data_check.check_data(replace_options(config, _name_reward(config.reward, reward)))
    print(data_check.format_report(report))
    return list(report["problems"])


def _run(command: str, config: Config, workdir: Workdir, reward: Function) -> RunResult:
    options = replace_options(config, _name_reward(config.reward, reward))
    config = loading.from_config_dict(dataclasses.asdict(options), command)
    default = command_line.default_workdir(config.experiment_name, command)
    workdir = command_line.read_workdir(workdir or default)
    run = pkgutil.resolve_name(commands.RUNNERS[command])
    with commands.prepared_run(config, workdir, command != "train") as (resolved, folder):
        return RunResult(run(resolved, folder), workdir, folder)


def _name_reward(options: Reward, function: Function) -> dict[str, str]:
    """Return the option that stands for a function, with a digest of its source text."""
    if function is None:
        return {}
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise UserError(f"reward={function!r}: expected a function; options take its name")
    for option in ("function", "terms", "url"):
        if getattr(options, option):
            raise UserError(f"reward={name}: unset config.reward.{option}: reward__{option}=''")
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = ""
        print(f"note: reward={name} has no source text: a resumed run cannot see that it changed")
    return {"reward.function": keep_in_memory(name, function, text)}


@dataclasses.dataclass(frozen=True)
class Policy:
    """A language model of a folder, ready to sample from, on a mesh of all devices."""

    folder: Path
    model: Transformer
    tokenizer: Any
    mesh: jax.sharding.Mesh
    engine: RolloutEngine


def load_policy(path: str | Path, *, dtype: str = "float32") -> Policy:
    """Load a language model to sample from.

    Args:
      path: the work directory of a run that exported its model, a Hugging Face folder, one of these
        in a bucket (gs://BUCKET/FOLDER), or a hub name (OWNER/NAME or OWNER/NAME@REVISION).
      dtype: data type of weights and computation: "float32" or "bfloat16".

    Raises:
      UserError: there is no such model, it is not supported, or JAX finds no devices.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"load_policy: dtype={dtype!r}: expected 'float32' or 'bfloat16'")
    backends.start_backends()
    folder = _policy_folder(str(path))
    options = Config(model=schema.Model(dtype=dtype))
    tokenizer = tokenizer_lib.load_tokenizer(str(folder), option="load_policy: path")
    nets = read_networks(options, Folders(actor=folder))
    model = nets.with_ids(tokenizer_lib.count_ids(tokenizer)).actor
    mesh = meshes.make_mesh(schema.MeshShape())
    shapes = heads.param_shapes(model, "lm")
    shardings = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    with jax.set_mesh(mesh):
        params = load_checkpoint(folder, model.architecture, shardings, dtype=jnp.dtype(dtype))
        engine = BuiltInEngine(mesh, model, params)
        engine.start()
        engine.update_weights(params)
    return Policy(folder=folder, model=model, tokenizer=tokenizer, mesh=mesh, engine=engine)


def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    max_response_length: int = 128,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    n: int = 1,
    seed: int = 0,
    chat_template: chat_templates.ChatTemplate = True,
    max_num_seqs: int = 256,
) -> list[str]:
    """Sample responses to prompts.

    A response depends on the seed and on its index among the responses, not on the other prompts.

    Args:
      policy: from `load_policy`.
      prompts: texts, or chats as lists of {"role": ..., "content": ...} messages.
      max_response_length: maximum number of tokens of a response.
      temperature: divides the logits; 0 is greedy.
      top_k: draw from the k most likely tokens; -1: from all.
      top_p: draw from the most likely tokens that together hold this probability.
      stop: strings that end a response; the token that completes one is its last.
      n: responses per prompt.
      seed: seed of the draws.
      chat_template: apply the tokenizer's chat template to chats, if it has one; a dict has
        variables for it.
      max_num_seqs: samples that a device decodes at once; the others wait for a free slot.

    Returns:
      `n` responses per prompt, in the order of the prompts, without special tokens. Prompt and
      response concatenated read as one text.

    Raises:
      UserError: an argument is out of range, or a prompt is empty or too long for the model.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise UserError(f"sample: prompts={prompts!r}: expected a list of prompts")
    if not prompts:
        return []
    eos_ids = (*policy.model.architecture.eos_ids, policy.tokenizer.eos_token_id)
    options = SamplingOptions(
        max_response_length=_in_range("max_response_length", max_response_length, at_least=1),
        temperature=_in_range("temperature", temperature, at_least=0, kind=Real),
        top_k=_in_range("top_k", top_k, at_least=-1),
        top_p=_in_range("top_p", top_p, at_least=0, at_most=1, kind=Real),
        n=_in_range("n", n, at_least=1),
        eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        slots=_in_range("max_num_seqs", max_num_seqs, at_least=1),
        stop=_search_for(policy, stop),
    )
    prompt_ids = _encode_prompts(policy, prompts, max_response_length, chat_template)
    seed = _in_range("seed", seed, at_least=-(2**31), at_most=2**31 - 1)
    response_ids = _generate(policy, prompt_ids, options, seed)
    return [
        tokenizer_lib.decode_continuation(policy.tokenizer, prompt_ids[i // n][-1], ids)
        for i, ids in enumerate(response_ids)
    ]


def _generate(
    policy: Policy, prompt_ids: Sequence[Sequence[int]], options: SamplingOptions, seed: int
) -> list[list[int]]:
    # Copies of the first prompt fill up the batch, to divide it among devices.
    padding = -len(prompt_ids) % meshes.row_shards(policy.mesh)
    rows = [*prompt_ids, *[prompt_ids[0]] * padding]
    prompt_lengths = np.array([len(ids) for ids in rows], np.int32)
    cap = rope.max_sequence_length(policy.model.architecture)
    width = prompt_batches.bucket_width(int(prompt_lengths.max()), cap)
    prompts = Prompts(tokens=prompt_batches.pad_token_rows(rows, width), lengths=prompt_lengths)
    with jax.set_mesh(policy.mesh):
        batch = placement.place(prompts, sharding.rows(policy.mesh))
        everywhere = sharding.replicated(policy.mesh)
        key = jax.jit(lambda: jax.random.key(seed), out_shardings=everywhere)()
        rollout = policy.engine.generate(batch, key, options)
        responses = placement.to_host(rollout.responses)
        lengths = placement.to_host(rollout.lengths)
    return [responses[i, : lengths[i]].tolist() for i in range(len(prompt_ids) * options.n)]


def _search_for(policy: Policy, stop: Sequence[str]) -> TextSearch | None:
    if not stop:
        return None
    is_list = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not is_list or not all(isinstance(string, str) and string for string in stop):
        raise UserError(f"sample: stop={stop!r}: expected a list of texts, none of them empty")
    vocab_size = policy.model.architecture.vocab_size
    tokens = token_bytes(policy.tokenizer, f"sample: stop={stop!r}", stop)[:vocab_size]
    return search_for(stop, tokens, vocab_size)


def _policy_folder(path: str) -> Path:
    """Return the folder of a checkpoint, downloaded if necessary; a run's is WORKDIR/actor."""
    option = "load_policy: path"
    if remote.is_address(path):
        remote.validate_address(path, option)
        exported = f"{path.rstrip('/')}/actor"
        is_run = "config.json" in remote.list_files(exported, option)
        return resolve_model_folder(exported if is_run else path, what=option)
    folder = expand_local_path(path, option)
    if (folder / "actor" / "config.json").exists():
        return folder / "actor"
    return resolve_model_folder(path, what=option)


def _encode_prompts(
    policy: Policy,
    prompts: Sequence[Prompt],
    max_response_length: int,
    chat_template: chat_templates.ChatTemplate,
) -> list[list[int]]:
    limit = rope.max_sequence_length(policy.model.architecture)
    chat_templates.validate_chat_template(policy.tokenizer, chat_template)
    encoded = []
    for number, prompt in enumerate(prompts):
        location = f"sample: prompts[{number}]"
        if not isinstance(prompt, str | list | tuple):
            raise UserError(f"{location}={prompt!r}: expected a text or a list of messages")
        require_text(prompt, location)
        if not isinstance(prompt, str):
            prompt = parse_prompt(prompt, location, "a chat")
        ids = chat_templates.encode_prompt(policy.tokenizer, prompt, chat_template)
        if not ids:
            raise UserError(f"{location}={prompt!r}: the prompt has no tokens")
        if len(ids) + max_response_length > limit:
            raise UserError(
                f"{location}: {len(ids)} tokens and max_response_length="
                f"{max_response_length} exceed the {limit} tokens that the model can read"
            )
        encoded.append(ids)
    return encoded


def _in_range(
    name: str, value: Any, *, at_least: float, at_most: float = np.inf, kind: type = Integral
) -> Any:
    is_number = isinstance(value, kind)
    if not is_number or not at_least <= value <= at_most:
        limit = f"at least {at_least}" if at_most == np.inf else f"{at_least} to {at_most}"
        limit += " in whole numbers" if kind is Integral else ""
        raise UserError(f"sample: {name}={value!r}: expected {limit}")
    return value
