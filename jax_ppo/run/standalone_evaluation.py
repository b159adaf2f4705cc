"""An evaluation without training: of an exported model, or of a checkpoint of a run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jax_ppo.config import loading
from jax_ppo.config.rollout_options import Sampling
from jax_ppo.config.schema import (
    Config,
    Critic,
    Model,
    Teacher,
    flatten_options,
    options_by_name,
    replace_options,
)
from jax_ppo.config.training_options import LoraOptions
from jax_ppo.data import sources
from jax_ppo.errors import UserError
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.fields import read_json_object
from jax_ppo.models.hf.model_folders import resolve_model_folder
from jax_ppo.models.hf.save import VALUE_UNIT
from jax_ppo.reporting import console
from jax_ppo.run.build import build_run
from jax_ppo.run.evaluation import evaluate_policy
from jax_ppo.run.parts import PPORun
from jax_ppo.run.reporter import Reporter
from jax_ppo.runtime import backends, compiled_programs, devices, heartbeat, meshes
from jax_ppo.sampler import engine
from jax_ppo.storage import local_files
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from jax_ppo.training.roles import SMALL_MODEL
from jax_ppo.training.state import TrainState

# The policy is the only model that is read.
_WITHOUT_CRITIC = {"algorithm.adv_estimator": "rloo"}
_NO_REFERENCE = {"algorithm.use_reference": False, "teacher": Teacher()}


def evaluate_model(config: Config, workdir: Path) -> dict[str, Any]:
    """Evaluate the model; return summary.json's contents. Raise `UserError` without prompts."""
    if not (config.data.val_files or config.data.val_fraction):
        raise UserError(
            "config.data.val_files='': an evaluation needs held-out prompts, there or as "
            "config.data.val_fraction of the training prompts"
        )
    checkpoint = find_checkpoint(config.model.path)
    if checkpoint is not None:
        saved = read_run_options(checkpoint)
        # The shapes in the checkpoint depend on these.
        sections = {name: getattr(saved, name) for name in ("model", "critic", "algorithm")}
        normalize = saved.reward.normalize
        config = replace_options(config, {"reward.normalize": normalize, **sections})
    else:
        model = with_exported_actor(config.model)
        config = replace_options(config, {"model": model, **_WITHOUT_CRITIC})
    config = replace_options(config, _NO_REFERENCE)
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh), compiled_programs.count_compilations() as compiled:
        run = build_run(config, workdir, mesh, console.print_on_main, trains=False)
        with (
            engine.running(run.engine),
            run.rules.running(),
            Reporter(run, workdir, Progress(), compiled) as reporter,
        ):
            state = load_models(run, checkpoint, ("actor",))
            step = int(state.step)
            evaluation = evaluate_policy(run, state)
            subject = checkpoint or config.model.lora.path or config.model.path
            reporter.report_evaluation(step, evaluation, subject=str(subject))
            return reporter.write_summary(step, mesh)


def try_policy(config: Config, count: int) -> tuple[list[dict[str, Any]], str]:
    """Return responses to `count` training prompts, sampled as in a step and scored, and a table.

    The former are as `sample_reports` describes them. Nothing is written.
    """
    backends.start_backends()
    compiled_programs.enable_cache(config.trainer.compilation_cache, lambda line: None)
    rollout = config.rollout
    changes = {
        "model": devices.resolve_dtype_here(config.model)[0],
        "data.val_files": sources.without_weights(config.data.train_files),
        "data.val_max_samples": count,
        "data.val_fraction": 0.0,
        "rollout.val_kwargs": Sampling(
            rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p
        ),
    }
    config = replace_options(config, changes | _WITHOUT_CRITIC | _NO_REFERENCE)
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run = build_run(config, Path(), mesh, lambda line: None, trains=False)
        beating = heartbeat.beating(console.print_aside)
        with beating, engine.running(run.engine), run.rules.running():
            records = evaluate_policy(run, load_models(run, None, ("actor",))).records
    return records, console.format_sample_table(records)


def find_checkpoint(model_path: str) -> Path | None:
    """Return the checkpoint of a run that a path names, `None` if it names something else."""
    path = local_files.expand_local_path(model_path, "config.model.path")
    # Other models may be in a folder of this name, too.
    is_step = path.name.isdecimal() and path.parent.name == local_files.CHECKPOINTS
    return path if is_step and path.is_dir() else None


def with_exported_actor(model: Model) -> Model:
    """Return the section with the exported, merged actor if its path is a work directory."""
    path = local_files.expand_local_path(model.path, "config.model.path")
    if model.path and (path / "actor" / "config.json").exists():
        if name := model.lora.path:
            merged = f"the adapters of the run are merged into {path / 'actor'}"
            console.print_on_main(f"note: config.model.lora.path={name!r} is not read: {merged}")
        return dataclasses.replace(model, path=str(path / "actor"), lora=LoraOptions())
    return model


def with_exported_models(model: Model, critic: Critic, has_critic: bool) -> tuple[Model, Critic]:
    """Return the sections with the exported models, if model.path is a work directory.

    Adapters of a critic are on the base of the actor's: it is then not the merged actor.
    """
    exported = local_files.expand_local_path(model.path, "config.model.path") / "critic"
    path = critic.path
    if not path and exported.is_dir() and has_critic:
        path = str(exported)
        # A critic trained alone has no actor beside it.
        adapter = exported.with_name("adapter")
        if all(peft.holds_adapters(x) for x in (exported, adapter)):
            described = read_json_object(adapter / peft.ADAPTER_CONFIG)
            base = str(described.get("base_model_name_or_path"))
            if revision := described.get("revision"):
                base += f"@{revision}"
            lora = LoraOptions(path=str(adapter))
            model = dataclasses.replace(model, path=base, lora=lora)
    # Exported, it is a separate model, which knows the unit of its values.
    folder = resolve_model_folder(path, "config.critic.path") if path else Path()
    normalizes = critic.normalize_values or (folder / VALUE_UNIT).exists()
    critic = dataclasses.replace(
        critic, path=path, shared_trunk=False, normalize_values=bool(path) and normalizes
    )
    return with_exported_actor(model), critic


def read_run_options(checkpoint: Path) -> Config:
    """Return the options of the run that wrote a checkpoint, with the path of its model.

    Options that this version does not have are left out, with a line that names them.
    """
    workdir = checkpoint.parents[1]
    try:
        saved = flatten_options(read_json_object(workdir / "config.json"))
        removed = {name: saved.pop(name) for name in saved.keys() - options_by_name().keys()}
        run = loading.load_config(overrides=saved)
    except UserError as error:
        raise UserError(
            f"config.model.path={str(checkpoint)!r}: cannot read the options of its run: {error}"
        ) from error
    if removed:
        listed = ", ".join(f"{name}={removed[name]!r}" for name in sorted(removed))
        console.print_on_main(f"note: options of the run that this version does not have: {listed}")
    path = run.model.path or str(SMALL_MODEL)
    if run.trainer.critic_only:
        raise UserError(
            f"config.model.path={str(checkpoint)!r}: a checkpoint of jax_ppo.critic has no actor; "
            f"set config.model.path={path} and, to score, config.critic.path={workdir / 'critic'}"
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, path=path))


def load_models(run: PPORun, checkpoint: Path | None, trained_roles: tuple[str, ...]) -> TrainState:
    """Return a state without optimizers.

    Of `trained_roles`, those that the checkpoint has are read from it, and others are absent;
    without a checkpoint all are read from their folders.
    """
    progress = console.make_loading_reporter
    if checkpoint is None:
        return run.states.create_models(run.folders, progress)
    step = int(checkpoint.name)
    shapes = run.states.trained_shapes()
    with Checkpointer(checkpoint.parent, read_only=True) as checkpoints:
        trained = checkpoints.restore(
            step, {name: shapes[name] for name in (*trained_roles, "control") if name in shapes}
        ).arrays
    return run.states.create(run.folders, progress, trained | {"optimizer": {}}, step)
