"""Divides the layers of a transformers model over ranks, by the plan that its architecture has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlinf.errors import ConfigError


def parallelize(module: Any, mesh: Any) -> None:
    """Divide the linear layers of ``module.model`` over the ranks of a one-dimensional mesh.

    Args:
        module: A scoring module; ``module.model`` is a transformers model.
        mesh: Tensor ranks.

    Raises:
        ConfigError: The architecture has no plan, or its heads do not divide; of the key
            `tensor_parallel_size`.
    """
    model = module.model
    text = model.config.get_text_config()
    patterns: dict[str, str] = dict(text.base_model_tp_plan or {})
    if not patterns:
        raise ConfigError(
            f"{type(model).__name__} has no plan for tensor parallelism; nearest: 1",
            key="tensor_parallel_size",
        )
    for heads in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, heads, None)
        if number is not None and number % mesh.size():
            raise ConfigError(
                f"{mesh.size()} does not divide the model's {heads} {number}",
                key="tensor_parallel_size",
            )
    backbone = model.base_model
    plan = {}
    embedding = backbone.get_input_embeddings()
    for name, part in backbone.named_modules():
        for pattern, style in patterns.items():
            if part is not embedding and re.fullmatch(
                re.escape(pattern).replace(r"\*", r"\d+"), name
            ):
                plan[name] = _style(style, type(model).__name__)
    parallelize_module(backbone, mesh, plan)
    _parallelize_vocabulary(model, mesh)


def _style(name: str, architecture: str) -> ParallelStyle:
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        # A norm of each head: the heads are divided, its weights are not.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(
            sequence_dim=2, use_local_output=True
        ),
    }
    if name not in styles:
        raise ConfigError(
            f"{architecture} divides a layer by `{name}`, which is not known here; nearest: 1",
            key="tensor_parallel_size",
        )
    return styles[name]()


def _parallelize_vocabulary(model: Any, mesh: Any) -> None:
    """Divide the output layer by rows of the vocabulary, and the embedding with it where tied."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        by_rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(embedding, mesh, by_rows)
        head.weight = embedding.weight
