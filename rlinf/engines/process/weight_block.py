"""Weights in shared memory: written by the parent, used by the child as they lie there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import RunFailure
from rlinf.processes.shared_block import (
    MemoryShortageError,
    SharedBlock,
    block_size,
    memory_path,
    open_memory,
    reserve,
)


class TensorInfo(NamedTuple):
    """What one tensor of a block is like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class BlockAddress(NamedTuple):
    """What a child needs to find a block."""

    path: str  # file that stands for the memory while the parent lives
    tensors: tuple[TensorInfo, ...]  # what lies in it, in order

    def open(self) -> dict[str, Tensor]:
        """The tensors, in memory that must not be written to: doing so ends the process."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return _mapped(descriptor, self.tensors, writable=False)
        finally:
            os.close(descriptor)


class WeightBlock:
    """Memory for one set of weights, which give names, shapes, types and the first values."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._infos = _infos(weights)
        self._descriptor = open_memory("rlinf-engine-weights")
        try:
            reserve(self._descriptor, block_size(_fields(self._infos)))
        except MemoryShortageError as error:
            self.close()
            raise RunFailure(f"no memory for an engine's weights: {error}") from error
        self._tensors = _mapped(self._descriptor, self._infos, writable=True)
        self.write(weights)

    @property
    def address(self) -> BlockAddress:
        """Where the child finds it."""
        return BlockAddress(str(memory_path(self._descriptor)), self._infos)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these weights have the names, shapes and types of those in the block."""
        return _infos(weights) == self._infos

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the values, from any device, while the child computes nothing."""
        for name, value in weights.items():
            self._tensors[name].copy_(value)

    def close(self) -> None:
        """Give the memory back as soon as the child has, too."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._tensors = {}


def _infos(weights: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, tuple(value.shape), value.dtype)
        for name, value in sorted(weights.items(), key=lambda item: item[0])
    )


def _fields(infos: tuple[TensorInfo, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """As bytes: numpy has not every type of torch."""
    return {info.name: ((info.nbytes,), np.dtype(np.uint8)) for info in infos}


def _mapped(descriptor: int, infos: tuple[TensorInfo, ...], *, writable: bool) -> dict[str, Tensor]:
    block = SharedBlock(descriptor, _fields(infos), writable=writable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
        return {
            info.name: (
                torch.from_numpy(block[info.name]).view(info.dtype).view(info.shape)
                if info.nbytes
                else torch.empty(info.shape, dtype=info.dtype)
            )
            for info in infos
        }
