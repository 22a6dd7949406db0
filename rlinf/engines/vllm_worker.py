"""What runs inside of vLLM's workers: replaces the weights in place.

Named as vLLM's ``worker_extension_cls``, so that its methods can be called on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Received = Iterable[tuple[str, "Tensor | np.ndarray"]]


class WeightUpdate:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def replace_weights(self, weights: Received) -> None:
        """Load values under the names of the checkpoint format.

        The linear layers on a CPU keep repacked copies, and an output layer that is tied to the
        embedding keeps *its* copy through a reload without an error: it is packed again here.
        """
        pairs = (
            (name, value if isinstance(value, Tensor) else torch.from_numpy(value))
            for name, value in weights
        )
        self.model_runner.reload_weights(weights_iterator=pairs)
        model = self.model_runner.get_model()
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            _repack_embeddings(model)


def _repack_embeddings(model: Any) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
