"""What the workers of oracles.py in torch share: a case as tensors, and a peer's answers with their gradients."""

from collections.abc import Callable

import torch


def tensors(case: dict) -> dict[str, torch.Tensor]:
    """In float64, so that what is left between two sides is a difference of formula and not of rounding."""
    torch.set_default_dtype(torch.float64)
    return {name: torch.from_numpy(array) for name, array in case.items()}


class Answers(dict):
    """Arrays to compare, by the name of what was asked."""

    def add(self, name: str, values) -> None:
        self[name] = torch.as_tensor(values).detach().numpy()

    def graded(
        self,
        name: str,
        function: Callable,
        at: torch.Tensor,
        cotangents: torch.Tensor | None = None,
    ):
        """function(at), and the gradient of it, or of sum cotangents * function(at), with respect to `at`.

        The function may give a tuple, of which the first is meant; returns the rest.
        """
        at = at.clone().requires_grad_()
        found = function(at)
        values, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
        values.backward(cotangents)
        self.add(name, values)
        self.add(f"{name}, gradient", at.grad)
        return rest
