"""Export the trained roles of a PPO run at its end, as Hugging Face folders and adapters.

`training.roles.Export` says for each role to which folder, and for which option.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_ppo.models.heads import without_part
from jax_ppo.models.hf.model_folders import shareable_model_name
from jax_ppo.models.hf.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_obstacle, save_adapters
from jax_ppo.models.hf.save import export_checkpoint, refuse_foreign_folder
from jax_ppo.models.hf.weight_files import merge_adapters
from jax_ppo.reporting import console
from jax_ppo.reporting.journal import Journal
from jax_ppo.run.parts import PPORun
from jax_ppo.runtime import signals
from jax_ppo.training.roles import Export, ModelRole, RunRole
from jax_ppo.training.state import TrainState


def export_models(run: PPORun, state: TrainState, folder: Path, journal: Journal) -> None:
    """Write the trained models as Hugging Face folders."""
    for role, export in _exported_roles(run.states.roles):
        with signals.limited(f"exporting the {role.title}"):
            _export_role(run, role, export, state, folder, journal)


def _export_role(
    run: PPORun, role: ModelRole, export: Export, state: TrainState, folder: Path, journal: Journal
) -> None:
    # The actor's adapters are merged into its folder, and also written to a separate one. The
    # critic's are written in PEFT's format only.
    # A critic that is a head on the actor's trunk is in the actor's tree.
    source = role.name if role.name in state.models else "actor"
    net = run.nets[source]
    trained = without_part(state.models[source], export.left_out)
    architecture = net.architecture
    if role.name == "actor":
        # Elsewhere, too, a response ends where this run has ended it.
        eos_ids = tuple(dict.fromkeys([*architecture.eos_ids, *run.sampling.eos_ids]))
        architecture = dataclasses.replace(architecture, eos_ids=eos_ids)
    critic_unit: dict[str, float] | None = None
    if export.per_token:  # what a critic predicts is normalized by these moments, if there are any
        moments = state.control.moments.get("returns")
        critic_unit = {name: float(x) for name, x in moments._asdict().items()} if moments else {}
    save = functools.partial(
        export_checkpoint,
        architecture=architecture,
        folder=folder / role.name,
        dtype=run.config.trainer.export_dtype,
        source_folder=run.folders.get(role.name, run.folders.actor),
        tokenizer_folder=Path(run.tokenizer.name_or_path),
        critic_unit=critic_unit,
    )
    if net.lora is None:
        save(trained)
        journal.report_model(folder / role.name, role.path_option)
        return
    if export.merges_adapters:
        save(merge_adapters(state.reference, trained, net.architecture, net.lora))
        journal.report_model(folder / role.name, role.path_option)
    if obstacle := peft_obstacle(architecture, net.lora):
        console.print_on_main(f"the {role.title}'s adapters are not written: {obstacle}")
        return
    # PEFT finds the base by this name; a hub name works on other machines, too.
    base = shareable_model_name(run.config.model.path, run.folders.actor)
    adapter_folder = folder / export.adapter_folder
    save_adapters(
        trained, architecture, net.lora, adapter_folder, base, run.folders.actor, critic_unit
    )
    if not export.merges_adapters:
        option = f"{role.path_option} with the same config.model.path and lora.rank"
        journal.report_model(adapter_folder, option, f"PEFT on {base[0]}")


def _exported_roles(roles: Sequence[RunRole]) -> Iterator[tuple[ModelRole, Export]]:
    for role in roles:
        if role.is_exported and role.entry.export is not None:
            yield role.entry, role.entry.export


def refuse_foreign_exports(roles: Sequence[RunRole], folder: Path) -> None:
    """Raise `UserError` if a folder that the run will export to holds something else."""
    has_adapters = any(role.has_adapters for role in roles)
    for role, export in _exported_roles(roles):
        if export.merges_adapters or not has_adapters:
            refuse_foreign_folder(folder / role.name)
        if has_adapters:
            refuse_foreign_folder(folder / export.adapter_folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
