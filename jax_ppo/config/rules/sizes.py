"""Rules of the data, the batches and the packed rows."""

from jax_ppo.config.schema import Config, all_options, option_value
from jax_ppo.errors import UserError

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


def require_set(config: Config, name: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not option_value(config, name):
        doc = next(option.facts.doc for option in all_options() if option.name == name)
        # The meaning of an empty value to other commands does not help here.
        meaning = doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def require_mini_batches_divide_batch(config: Config) -> None:
    """Raise `UserError` unless mini-batches divide the batch."""
    batch = config.data.train_batch_size
    for role in (config.actor, config.critic):
        mini_batch = role.ppo_mini_batch_size
        if mini_batch and batch % mini_batch:
            name = "actor" if role is config.actor else "critic"
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is "
                f"{_nearest_divisor(batch, mini_batch)}"
            )


def require_row_holds_sample(config: Config) -> None:
    """Raise `UserError` unless a packed row holds the longest sample."""
    row_length = config.packing.row_length
    if row_length is not None and row_length < config.sequence_length:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold "
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{config.sequence_length} tokens; set it to that or more"
        )


def require_row_holds_example(config: Config, command: str) -> None:
    """Raise `UserError` unless a packed row holds the longest example of supervised training."""
    row_length = config.packing.row_length
    responses = RESPONSES_PER_EXAMPLE[command]
    longest = config.sequence_length * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )


def _nearest_divisor(number: int, target: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda divisor: abs(divisor - target))
