"""The policy that a run began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlinf.models.adapters import is_adapter, without_adapter
from rlinf.trainers.modules import POLICY, TrainedModules
from rlinf.trainers.trained import Source, TrainedModule


class Reference:
    """Copies of the policy's weights and buffers on the host; none with an adapter, which can be
    switched off.

    Args:
        modules: The policy among them.

    Attributes:
        weights: This rank's part of them, as forward passes read them.
        buffers: The others.
    """

    def __init__(self, modules: TrainedModules) -> None:
        self._modules = modules
        self.keeps = not any(map(is_adapter, self._held.named))
        self.weights: Source = []
        self.buffers: list[Tensor] = []
        if self.keeps:
            self.weights = [tensor.to("cpu", copy=True) for tensor in self._held.used()]
            self.buffers = [tensor.to("cpu", copy=True) for tensor in self._held.buffers().values()]

    @property
    def _held(self) -> TrainedModule:
        return self._modules.held[POLICY]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the weights of the policy for those of the reference."""
        self._modules.need_loaded()
        held = self._held
        if not self.keeps:
            with without_adapter(held.module):
                yield
            return
        used = [*held.used(), *held.buffers().values()]
        with torch.no_grad():
            present = [tensor.clone() for tensor in used]
            _copy(used, [*self.weights, *self.buffers])
            held.forget_gathered()
            try:
                yield
            finally:
                _copy(used, present)
                held.forget_gathered()

    def state_dict(self, *, keep: bool) -> dict[str, Any] | None:
        """Whole weights by name, and buffers; None where none are kept.

        Args:
            keep: False on ranks that only take part.
        """
        if not self.keeps:
            return None
        held = self._held
        whole = held.gather(self.weights, keep=keep, dtype=held.dtype)
        return {"weights": whole, "buffers": dict(zip(held.buffers(), self.buffers, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, given whole on every rank."""
        for name, value in state["weights"].items():
            self._held.fill(name, self.weights, value)
        _copy(self.buffers, list(state["buffers"].values()))

    def parts(self) -> dict[str, Any]:
        """The same, as this rank keeps it."""
        if not self.keeps:
            return {}
        held = self._held
        weights = {name: held.part(name, self.weights) for name in held.named}
        return {"weights": weights, "buffers": dict(zip(held.buffers(), self.buffers, strict=True))}

    def load_parts(self, parts: Mapping[str, Any]) -> None:
        """Continue from :meth:`parts`, into whose memory was read."""
        held = self._held
        for name in held.named if self.keeps else ():
            # On an accelerator they are copies of what lies on the host.
            held.fill(name, self.weights, held.whole(parts["weights"][name]))


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
