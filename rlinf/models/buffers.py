"""Numbers of a model that are saved with its weights and that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the model's files, by name; a tied one once.

    Such as the corrections by which routers of DeepSeek-V3 balance their experts; rotary
    frequencies are no part of the files.
    """
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
