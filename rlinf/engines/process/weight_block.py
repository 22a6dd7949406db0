"""Weights in shared memory: written by the parent, used by the child as they lie there."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.errors import RunFailure

_ALIGNMENT = 64  # as torch aligns its own memory, so that kernels compute the same bits


@dataclass(frozen=True)
class Place:
    """Where one tensor lies.

    Args:
        name: Its name.
        shape: Its shape.
        dtype: Its type.
        offset: First byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BlockAddress:
    """What a child needs to find a block.

    Args:
        path: File that stands for the memory while the parent lives.
        places: What lies where.
    """

    path: str
    places: tuple[Place, ...]

    def open(self) -> dict[str, Tensor]:
        """The tensors, in memory that must not be written to: doing so ends the process."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return _tensors(descriptor, self.places, mmap.PROT_READ)
        finally:
            os.close(descriptor)


class WeightBlock:
    """Memory for one set of weights.

    Args:
        weights: Gives names, shapes and types, and the first values.

    Raises:
        RunFailure: There is not so much memory.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._places = _lay_out(weights)
        size = max((place.offset + place.nbytes for place in self._places), default=0)
        self._descriptor = os.memfd_create("rlinf-engine-weights")
        try:
            os.posix_fallocate(self._descriptor, 0, max(size, 1))
        except OSError as error:
            self.close()
            raise RunFailure(
                f"no shared memory for {size} bytes of an engine's weights: {error.strerror}"
            ) from error
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._tensors = _tensors(self._descriptor, self._places, access)
        self.write(weights)

    @property
    def address(self) -> BlockAddress:
        """Where the child finds it."""
        return BlockAddress(f"/proc/{os.getpid()}/fd/{self._descriptor}", self._places)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether these weights have the names, shapes and types of those in the block."""
        return _lay_out(weights) == self._places

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the values, from any device, while the child computes nothing."""
        with torch.no_grad():
            for name, value in weights.items():
                self._tensors[name].copy_(value)

    def close(self) -> None:
        """Give the memory back as soon as the child has, too."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._tensors = {}


def _lay_out(weights: Mapping[str, Tensor]) -> tuple[Place, ...]:
    places, end = [], 0
    for name in sorted(weights):
        place = Place(name, tuple(weights[name].shape), weights[name].dtype, end)
        places.append(place)
        end = -(-(end + max(place.nbytes, 1)) // _ALIGNMENT) * _ALIGNMENT
    return tuple(places)


def _tensors(descriptor: int, places: tuple[Place, ...], access: int) -> dict[str, Tensor]:
    size = os.fstat(descriptor).st_size
    memory = np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED, access), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors
        whole = torch.from_numpy(memory)
    return {place.name: _view(whole, place) for place in places}


def _view(whole: Tensor, place: Place) -> Tensor:
    if not place.nbytes:
        return torch.empty(place.shape, dtype=place.dtype)
    part = whole[place.offset : place.offset + place.nbytes]
    return part.view(place.dtype).view(place.shape)
