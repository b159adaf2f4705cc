"""The checkpoint folder of each role: local, downloaded, or of a small model made for the run."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jax_ppo.config.schema import Config
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.hub import HUB_FILES, resolve_model_folder
from jax_ppo.runtime import work_directory
from jax_ppo.training.networks import Folders


def resolve_role_folders(
    config: Config,
    workdir: Path,
    describe_model: Callable[[Path], None],
    files: Sequence[str] = HUB_FILES,
) -> Folders:
    """Find or download every role's checkpoint, and describe a small actor if none is named.

    Args:
      config: the options.
      workdir: the small actor is written to its folder `model`.
      describe_model: writes the small actor, but for its weights, to a folder.
      files: patterns of the files to download.
    """
    model = config.model
    # Without a model a small one is made, so that a first run needs no download.
    if model.path:
        actor = resolve_model_folder(model.path, files=files)
    else:
        actor = workdir / work_directory.WARM_UP_MODEL
        describe_model(actor)
    critic = _critic_folder(config, actor, files)
    adapters = reward = reference = None
    if config.reference.path:
        reference = resolve_model_folder(
            config.reference.path, "config.reference.path", files=files
        )
    if config.reward.model_path:
        option = "config.reward.model_path"
        reward = resolve_model_folder(config.reward.model_path, option, files=files)
    if model.lora.path:
        adapters = resolve_model_folder(
            model.lora.path,
            "config.model.lora.path",
            f"{peft.ADAPTER_CONFIG} and {peft.ADAPTER_WEIGHTS}",
            files=HUB_FILES,
        )
    return Folders(actor, critic, reward, adapters=adapters, reference=reference)


def _critic_folder(config: Config, actor: Path, files: Sequence[str]) -> Path | None:
    if not config.has_critic or config.shares_trunk:
        return None
    if config.critic.path:
        return resolve_model_folder(config.critic.path, "config.critic.path", files=files)
    # A critic without a path of its own starts from the actor's weights.
    return actor
