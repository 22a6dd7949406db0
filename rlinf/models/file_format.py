"""The names and shapes that weights have in the files of a model.

transformers keeps some weights otherwise than files do: the experts of a layer, each with matrices
of its own in the files, are one tensor while it computes. Programs that read files, and engines
that are given weights as if from files, want the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def file_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are in files; those that are the same there share memory.

    Args:
        model: Of transformers; only its class and configuration are looked at.
        weights: By the names of its ``state_dict``, whole; need not be all.
    """
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return converted


def without_weights(path: Path) -> Any:
    """The model in a directory, its weights without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
