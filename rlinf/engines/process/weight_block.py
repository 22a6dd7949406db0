"""Weights in shared memory: written by the parent, used by the child as they lie there."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import RunFailure
from rlinf.processes.byte_layout import ByteLayout, lay_out
from rlinf.processes.shared_block import MemoryShortageError, memory_path, open_memory, reserve


class BlockAddress(NamedTuple):
    """What a child needs to find a block."""

    path: str  # file that stands for the memory while the parent lives
    layout: ByteLayout

    def open(self) -> dict[str, Tensor]:
        """The tensors, in memory that must not be written to: doing so ends the process."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return _mapped(descriptor, self.layout, mmap.PROT_READ)
        finally:
            os.close(descriptor)


class WeightBlock:
    """Memory for one set of weights, which give names, shapes, types and the first values.

    Raises:
        RunFailure: There is not so much memory.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._layout = _layout_of(weights)
        self._descriptor = open_memory("rlinf-engine-weights")
        try:
            reserve(self._descriptor, self._layout.nbytes)
        except MemoryShortageError as error:
            self.close()
            raise RunFailure(f"no memory for an engine's weights: {error}") from error
        self._tensors = _mapped(self._descriptor, self._layout, mmap.PROT_READ | mmap.PROT_WRITE)
        self.write(weights)

    @property
    def address(self) -> BlockAddress:
        """Where the child finds it."""
        return BlockAddress(str(memory_path(self._descriptor)), self._layout)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these weights have the names, shapes and types of those in the block."""
        return _layout_of(weights) == self._layout

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the values, from any device, while the child computes nothing."""
        for entry in self._layout.owners:
            self._tensors[entry.name].copy_(weights[entry.name])

    def close(self) -> None:
        """Give the memory back as soon as the child has, too."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._tensors = {}


def _layout_of(weights: Mapping[str, Tensor]) -> ByteLayout:
    return lay_out({name: weights[name] for name in sorted(weights)}, {})


def _mapped(descriptor: int, layout: ByteLayout, protection: int) -> dict[str, Tensor]:
    memory = mmap.mmap(descriptor, max(layout.nbytes, 1), mmap.MAP_SHARED, protection)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
        return layout.views(torch.from_numpy(np.frombuffer(memory, np.uint8)))
