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

        On a CPU layers keep their weights packed. A reload packs linear layers again, but leaves an
        output layer that is tied to the embedding with its former copy and experts unpacked,
        without an error: both are packed here.
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
            _pack_experts(model)


def _repack_embeddings(model: Any) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _pack_experts(model: Any) -> None:
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
