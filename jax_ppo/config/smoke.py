"""The smoke form of a configuration: its algorithm with a model and data for two cores.

`--config=gsm8k:smoke` keeps the options of losses, advantages, KL and schedules. Models, data and
sizes are replaced by those of the small model that a run creates.
"""

from typing import TYPE_CHECKING

from jax_ppo.errors import UserError

if TYPE_CHECKING:
    import ml_collections

ARGUMENT = "smoke"

_BATCH = 8  # prompts
_RESPONSE = 24  # tokens


def shrink(
    config: "ml_collections.ConfigDict", defaults: "ml_collections.ConfigDict", value: str
) -> "ml_collections.ConfigDict":
    """Return the smoke form of a configuration, which is changed in place.

    Args:
      config: the configuration that its file returned.
      defaults: all options at their defaults.
      value: the value of `--config`, for messages.

    Raises:
      UserError: the configuration is one of supervised training, which creates no small model.
    """
    if "rollout" not in config or config.supervised != defaults.supervised:
        raise UserError(f"--config={value}: supervised training has no smoke form")
    config.experiment_name = f"{config.experiment_name}-smoke"
    mini_batches = max(1, config.data.train_batch_size // config.actor.ppo_mini_batch_size)
    config.data.update(
        train_files="arithmetic:64",
        val_files="arithmetic:16:heldout",
        train_batch_size=_BATCH,
        val_batch_size=16,
        max_prompt_length=48,
        max_response_length=_RESPONSE,
        instruction="",
        system_prompt="",
        prompt_template="",
    )
    config.actor.ppo_mini_batch_size = max(1, _BATCH // mini_batches)
    config.model.path = ""
    config.critic.path = ""
    config.model.tokenizer_path = ""
    config.model.dtype = "float32"
    config.model.create.update(steps=60, habit_steps=10)
    # The built-in rule of the problems replaces any other reward.
    config.reward.update(function="", terms="", url="", model_path="")
    config.reward.overlong_buffer_len = min(config.reward.overlong_buffer_len, _RESPONSE // 3)
    config.rollout.n = min(config.rollout.n, 4)
    config.mesh = defaults.mesh
    config.rollout.mesh = defaults.rollout.mesh
    config.packing = defaults.packing
    config.trainer.update(total_training_steps=4, test_freq=2, save_freq=0, export=False)
    return config
