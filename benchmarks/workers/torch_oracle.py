"""Helpers of the torch workers of oracles.py: cases as tensors, and answers with gradients."""

from collections.abc import Callable

import torch


def tensors(case: dict) -> dict[str, torch.Tensor]:
    """Convert a case to float64 tensors, so that differences are of formula, not of rounding."""
    torch.set_default_dtype(torch.float64)
    return {name: torch.from_numpy(array) for name, array in case.items()}


class Answers(dict):
    """Arrays to compare, by row name."""

    def add(self, name: str, values) -> None:
        self[name] = torch.as_tensor(values).detach().numpy()

    def add_with_gradient(
        self,
        name: str,
        function: Callable,
        at: torch.Tensor,
        cotangents: torch.Tensor | None = None,
    ):
        """Record function(at) and the gradient of its sum, weighted by `cotangents` if present.

        If the function returns a tuple, its first item is recorded and the others are returned.
        """
        at = at.clone().requires_grad_()
        result = function(at)
        values, other_results = (
            (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        )
        values.backward(cotangents)
        self.add(name, values)
        self.add(f"{name}, gradient", at.grad)
        return other_results
