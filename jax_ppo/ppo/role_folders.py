"""The checkpoint folder of each role: local, downloaded, or a small model made for the run."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.models.hf import peft
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.supervised import warmup
from jax_ppo.training.networks import Folders


def resolve_role_folders(
    config: Config, workdir: Path, mesh: Mesh, report: Callable[[str], None]
) -> Folders:
    """Find or download every role's checkpoint, and train a small actor if none is named.

    Args:
      config: the options.
      workdir: the small actor is written to its folder `model`.
      mesh: the mesh that the small actor is trained on.
      report: called with lines for the user.
    """
    model = config.model
    # Without a model a small one is made, so that a first run needs no download.
    if model.path:
        actor = resolve_model_folder(model.path)
    else:
        actor = workdir / "model"
        warmup.make_model(config, actor, mesh, report)
    critic = _critic_folder(config, actor)
    adapters = reward = None
    if config.reward.model_path:
        reward = resolve_model_folder(config.reward.model_path, "config.reward.model_path")
    if model.lora.path:
        adapters = resolve_model_folder(
            model.lora.path,
            "config.model.lora.path",
            f"{peft.ADAPTER_CONFIG} and {peft.ADAPTER_WEIGHTS}",
        )
    return Folders(actor=actor, critic=critic, reward=reward, adapters=adapters)


def _critic_folder(config: Config, actor: Path) -> Path | None:
    if not config.has_critic or config.shares_trunk:
        return None
    if config.critic.path:
        return resolve_model_folder(config.critic.path, "config.critic.path")
    # A critic without a path of its own starts from the actor's weights.
    return actor
