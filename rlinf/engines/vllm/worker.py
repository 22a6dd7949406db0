"""What runs inside of vLLM's workers: replaces the weights in place.

Named as vLLM's ``worker_extension_cls``, so that its methods can be called on every worker.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlinf.engines.process.weight_block import BlockAddress


class WorkerMethods:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def belong_to(self, owner: int, threads: int | None) -> None:
        """Make the process of this worker one of its owner's, with whom it ends.

        Args:
            owner: Id of the process that uses the engine. Signals are for it alone, which then ends
                the engine cleanly.
            threads: Threads that torch computes with; None: as they are.
        """
        threading.Thread(target=_end_with, args=(os.pidfd_open(owner),), daemon=True).start()
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C, a terminal that hangs up
                signal.signal(number, signal.SIG_IGN)
        if threads is not None:
            torch.set_num_threads(threads)

    def replace_weights_by(self, address: bytes) -> None:
        """Load what lies at a :class:`BlockAddress`, which is pickled."""
        found: BlockAddress = pickle.loads(address)
        self.replace_weights(found.open().items())

    def replace_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load values under the names of the checkpoint format.

        On a CPU layers keep their weights packed. A reload packs linear layers again, but leaves an
        output layer that is tied to the embedding with its former copy and experts unpacked,
        without an error: both are packed here.
        """
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        model = self.model_runner.get_model()
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            _repack_embeddings(model)
            _pack_experts(model)


def _end_with(owner: int) -> None:
    select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


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
