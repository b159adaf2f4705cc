"""Rules of the data, the batches and the packed rows."""

from jax_ppo.config.schema import Actor, Critic, Data, Packing, all_options
from jax_ppo.errors import UserError

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


def require_set(name: str, value: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not value:
        doc = next(option.facts.doc for option in all_options() if option.name == name)
        # The meaning of an empty value to other commands does not help here.
        meaning = doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def require_mini_batches_divide_batch(data: Data, actor: Actor, critic: Critic) -> None:
    """Raise `UserError` unless mini-batches divide the batch."""
    batch = data.train_batch_size
    sizes = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size}
    for name, mini_batch in sizes.items():
        if mini_batch and batch % mini_batch:
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is "
                f"{_nearest_divisor(batch, mini_batch)}"
            )


def require_row_holds_sample(packing: Packing, sequence_length: int) -> None:
    """Raise `UserError` unless a packed row holds the longest sample."""
    row_length = packing.row_length
    if row_length is not None and row_length < sequence_length:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold "
            "config.data.max_prompt_length + config.data.max_response_length = "
            f"{sequence_length} tokens; set it to that or more"
        )


def require_row_holds_example(packing: Packing, sequence_length: int, command: str) -> None:
    """Raise `UserError` unless a packed row holds the longest example of supervised training."""
    row_length = packing.row_length
    responses = RESPONSES_PER_EXAMPLE[command]
    longest = sequence_length * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )


def _nearest_divisor(number: int, target: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda divisor: abs(divisor - target))
