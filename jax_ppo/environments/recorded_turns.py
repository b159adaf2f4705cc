"""The turns of open dialogues, read from what a checkpoint holds of them."""

from typing import NamedTuple

import numpy as np

from jax_ppo.sampler.slots import Dialogues


class RecordedTurn(NamedTuple):
    """A turn that has been answered."""

    tokens: np.ndarray  # int32, of the turn
    observation: np.ndarray  # int32, the tokens that answered it
    reward: float  # of the turn
    context: int  # the number of the context that was continued


OpenTurns = list[RecordedTurn]  # of one dialogue; none if the dialogue has ended


def read_turns(responses: np.ndarray, lengths: np.ndarray, dialogues: Dialogues) -> list[OpenTurns]:
    """Return the answered turns of N dialogues.

    Args:
      responses: int32 [N, T], the responses so far, and observations that were not run yet.
      lengths: int32 [N], the tokens of the responses.
      dialogues: on the host.
    """
    contexts = dialogues.contexts

    def read(i: int) -> OpenTurns:
        answered = 0 if dialogues.closed[i] else dialogues.turns[i]
        # The current turn may not have begun.
        starts = np.union1d(np.flatnonzero(dialogues.starts[i]), dialogues.turn_start[i])
        turns = []
        for start, following in zip(starts[:answered], starts[1:], strict=False):
            end = start + dialogues.is_action[i, start:following].sum()
            context = 0
            if contexts is not None:
                context = int(contexts.numbers[i, end] if end < lengths[i] else contexts.current[i])
            turns.append(
                RecordedTurn(
                    tokens=responses[i, start:end],
                    observation=responses[i, end:following],
                    reward=float(dialogues.rewards[i, end - 1]),
                    context=context,
                )
            )
        return turns

    return [read(i) for i in range(len(lengths))]
