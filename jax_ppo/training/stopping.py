"""Ending a run early: the decision of all processes to save and stop after a signal."""

import jax

from jax_ppo.runtime import distributed, signals


class EvaluationInterrupted(Exception):
    """A signal asked the run to end between two batches of an evaluation."""


class StopRequest:
    """Whether SIGTERM or Ctrl-C asked a run to save and end.

    Every process of the run creates one and calls its methods in the same order.
    """

    def __init__(self) -> None:
        self._asked_step: int | None = None
        self._should_stop = False

    def should_stop(self, step: int) -> bool:
        """Return whether the run is to save and end after a step.

        Call it after every step; before the first call, a signal ends the run without saving. All
        processes get the same answer: they agree on a step that none of them has passed yet. The
        answer for a step does not change.
        """
        if step != self._asked_step:
            self._asked_step = step
            signals.defer_signals()
            # A signal may come at any time: the answer is fixed at the first question about a step.
            if jax.process_count() == 1:
                self._should_stop = signals.received_signal() is not None
            else:
                self._should_stop = _agree_to_stop()
        return self._should_stop

    def interrupt_evaluation(self, step: int) -> None:
        """Raise if the run is to end; call it between the batches of the evaluation after a step.

        All processes must call it equally often. `should_stop` then gives the same answer.

        Raises:
          EvaluationInterrupted: SIGTERM or Ctrl-C asked the run to save and end.
        """
        self._asked_step = None  # a signal may have come since the last question
        if self.should_stop(step):
            raise EvaluationInterrupted


def _agree_to_stop() -> bool:
    """Return whether the processes agreed to stop now, and record the signal."""
    agreed = distributed.agree_on_signal(signals.received_signal())
    if agreed is None:
        return False
    signals.record_signal(agreed)
    return True
