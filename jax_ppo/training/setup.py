"""Set-up that PPO and supervised training share."""

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.models import rope
from jax_ppo.runtime import sharding


def check_model(config: Config, mesh, architecture, tokenizer) -> None:
    """Raises UserError for a model that the mesh can not split, that is too short, or that is another tokenizer's."""
    sharding.check_architecture(mesh, architecture)
    if config.sequence_length > rope.max_sequence_length(architecture):
        raise UserError(
            f"config.data.max_prompt_length + config.data.max_response_length = {config.sequence_length}: the "
            f"model takes {rope.max_sequence_length(architecture)} tokens at most (its config.json)"
        )
    if len(tokenizer) > architecture.vocab_size:
        raise UserError(
            f"config.model.tokenizer_path: the tokenizer has {len(tokenizer)} tokens, the model's "
            f"embedding {architecture.vocab_size}; they do not belong together"
        )
