"""The models of a PPO run: folders, architectures and tokenizers of the roles; no weights."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config.schema import Config, Model
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.models.hf.load import describe_unread_parts, has_score_head
from jax_ppo.models.hf.peft import holds_adapters
from jax_ppo.ppo.reward_inputs import RewardInputs, load_reward_tokenizer, make_reward_inputs
from jax_ppo.reporting import console
from jax_ppo.runtime import meshes
from jax_ppo.training.decoders import describe_attention, packed_row_length
from jax_ppo.training.networks import Folders, Networks, critic_head
from jax_ppo.training.roles import RunRole, find_role, read_networks, resolve_role_folders

Report = Callable[[str], None]  # takes a line for the user


@dataclasses.dataclass(frozen=True)
class RunModels:
    """The models of a run, as their folders describe them, and the actor's tokenizer.

    `reward_inputs` is `None` without a reward model, or if it reads the sampled tokens.
    """

    folders: Folders
    nets: Networks
    tokenizer: Any
    reward_inputs: RewardInputs | None


def read_run_models(
    config: Config, roles: Sequence[RunRole], mesh: Mesh, report: Report, prompts_are_chats: bool
) -> RunModels:
    """Read what the folders of the roles say; `report` is called with lines for the user.

    Chats or texts as prompts decide the form of a reward model's inputs. Raise `UserError` if a
    folder does not exist, or holds no model that can take the role.
    """
    folders = resolve_role_folders(roles, config.model)
    nets = read_networks(config, folders)
    for folder in dict.fromkeys(folders.values()):
        for line in describe_unread_parts(folder):
            report(line)
    tokenizer = load_model_tokenizer(config.model, folders.actor, config.data.date)
    nets = nets.with_ids(tokenizer_lib.count_ids(tokenizer))
    architecture = nets.actor.architecture
    if architecture.num_ids is not None:
        report(
            f"{architecture.vocab_size - architecture.num_ids} of the embedding's "
            f"{architecture.vocab_size} rows have no token in the tokenizer: never drawn"
        )
    if config.critic.path and config.critic.keep_head is None and "critic" in folders:
        if critic_head(config.critic, folders["critic"]) == "reward":
            report("critic.keep_head: on, since critic.path holds a critic")
        elif not holds_adapters(folders["critic"]) and has_score_head(folders["critic"]):
            report(
                "note: the critic starts with a head of zeros; config.critic.keep_head=True keeps "
                "the head in config.critic.path"
            )
    attention = describe_attention(
        config.model,
        nets.actor,
        packed_row_length(config),
        decodes=config.rollout.engine == "built-in",
    )
    if attention:
        report(attention)
    reward_inputs = None
    if nets.reward is not None:
        reward_tokenizer, notes = load_reward_tokenizer(
            config.reward, nets.reward, folders["reward"], tokenizer, config.data.date
        )
        reward_inputs, lines = make_reward_inputs(
            config.reward,
            mesh,
            nets.reward,
            (reward_tokenizer, tokenizer),
            packed=config.packing.enabled,
            prompts_are_chats=prompts_are_chats,
        )
        for line in (*notes, *lines):
            report(line)
    return RunModels(folders, nets, tokenizer, reward_inputs)


def validate_run_models(
    roles: Sequence[RunRole],
    models: RunModels,
    sequence_length: int,
    mesh: Mesh,
    rollout_mesh: Mesh,
) -> None:
    """Raise `UserError` if a model does not fit the meshes, the sequences or the tokenizer."""
    nets = models.nets
    for name, net in nets.items():
        # A reward model with its own tokenizer was validated where its inputs were made.
        if name == "reward" and models.reward_inputs is not None:
            continue
        assert not isinstance(net, Deberta), "encoders have their own tokenizers"
        title = find_role(name).title
        validate_model(title, mesh, net.architecture, models.tokenizer, sequence_length)
    meshes.validate_architecture(
        rollout_mesh, nets.actor.architecture, option="config.rollout.mesh"
    )
    for role in roles:
        if not (role.is_used and role.path and role.entry.reads_actors_tokens):
            continue
        folder, option = models.folders[role.name], f"config.{role.entry.path_option}"
        # A folder without a tokenizer gives nothing to compare.
        if tokenizer_lib.has_tokenizer(folder):
            other = tokenizer_lib.load_tokenizer(str(folder), option=option)
            if other.get_vocab() != models.tokenizer.get_vocab():
                raise UserError(
                    f"{option}={role.path!r}: its tokenizer has another vocabulary, but a "
                    f"{role.entry.title} reads the actor's tokens"
                )


def load_model_tokenizer(options: Model, model_folder: Path, date: str) -> Any:
    """Return the tokenizer of `model.tokenizer_path`, or the one in the model's folder."""
    if options.tokenizer_path:
        return tokenizer_lib.load_tokenizer(options.tokenizer_path, date=date)
    return tokenizer_lib.load_tokenizer(str(model_folder), "config.model.path", date)


def validate_model(
    role: str, mesh: Mesh, architecture: Architecture, tokenizer: Any, sequence_length: int
) -> None:
    """Raise `UserError` unless the `role`'s model fits mesh, tokenizer and longest sequence."""
    meshes.validate_architecture(mesh, architecture)
    if meshes.vocabulary_axis(mesh, architecture.vocab_size) is None:
        console.print_on_main(
            f"note: config.mesh.model={mesh.shape['model']} does not divide the "
            f"{architecture.vocab_size} rows of the {role}'s embedding, so each device holds all"
        )
    max_length = rope.max_sequence_length(architecture)
    if sequence_length > max_length:
        raise UserError(
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{sequence_length}: the {role} takes {max_length} tokens at most (its config.json)"
        )
    if len(tokenizer) > architecture.vocab_size:
        raise UserError(
            f"the tokenizer (of config.model.tokenizer_path, else of config.model.path) has "
            f"{len(tokenizer)} tokens, the {role}'s embedding {architecture.vocab_size}; they do "
            "not belong together"
        )
