"""Takes the memory of tensors away and gives it back, without changing who refers to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloaded:
    """Storages whose contents lie in host memory; every tensor and view of them stays valid.

    Until :meth:`restore` nothing may read the tensors.

    Args:
        tensors: Those to take away; several may share a storage.
        keep: Copy the contents; otherwise they come back as zeros.
    """

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._parts: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        for tensor in storages.values():
            storage = tensor.untyped_storage()
            self._parts.append((storage, storage.nbytes(), _host_copy(tensor) if keep else None))
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the contents back to the same device."""
        for storage, size, copy in self._parts:
            storage.resize_(size)
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if copy is None:
                target.zero_()
            else:
                target.copy_(copy)
        self._parts = []


def _host_copy(tensor: Tensor) -> Tensor:
    """All bytes of the storage of a tensor, pinned where the device is an accelerator."""
    storage = tensor.untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.device.type != "cpu")
    return copy.copy_(source)
