"""An extension of vLLM's workers. vLLM imports a copy of this file, without this package."""

from typing import Any


class TiedHead:
    """Adds a method that `/collective_rpc` calls in each worker."""

    model_runner: Any

    def renew_tied_head(self) -> None:
        """Pack the output embedding again, after `reload_weights`.

        On a CPU, logits are computed from a packed copy of it, which vLLM (0.32.0) makes of a head
        that is the embedding only when it loads the model. On GPUs there is no copy.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
