"""Those who train together, and what they exchange: processes that divide a model, in torch's
process groups; and ranks that hold it whole, which may be threads, by messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlinf.scheduler.accelerators import collective_backend, set_current_device


class Ranks:
    """The processes that train together; one process needs no process group.

    A process group that the caller has made already is used as it is.

    Args:
        rank: Of this process.
        world_size: Processes.
        device: Where this process computes.
        store: torch's key-value store at which several processes meet.
        timeout_s: Seconds after which a lost process is given up.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        device: torch.device | str = "cpu",
        store: Store | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self._owns_group = False
        if world_size == 1:
            return
        set_current_device(str(self.device))
        if not dist.is_initialized():
            dist.init_process_group(
                collective_backend(str(self.device)),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            self._owns_group = True
        if dist.get_world_size() != world_size:
            raise ValueError(
                f"the process group has {dist.get_world_size()} ranks, not {world_size}"
            )

    def close(self) -> None:
        """End the process group, if it was made here."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False


class Grid:
    """Processes in data × tensor ranks: rank r has data rank r // ``tensor_size``.

    Args:
        ranks: The processes.
        tensor_size: Processes that share each layer; divides their number.

    Attributes:
        mesh: Two-dimensional device mesh with dimensions ``data`` and ``tensor``; None for one
            process.
        group: Process group of these ranks; None for that of all processes.
    """

    def __init__(self, ranks: Ranks, tensor_size: int) -> None:
        self.rank, self.world_size, self.device = ranks.rank, ranks.world_size, ranks.device
        self.tensor_size = tensor_size
        self.data_size = ranks.world_size // tensor_size
        self.data_rank = ranks.rank // tensor_size
        self.mesh: Any = None
        self.group: Any = None
        if ranks.world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh(
                self.device.type, (self.data_size, tensor_size), mesh_dim_names=("data", "tensor")
            )

    @classmethod
    def over(cls, group: Any, *, rank: int, size: int, device: torch.device) -> Grid:
        """Data ranks 0 to ``size`` − 1 of a process group that holds them alone; None for one."""
        grid = cls(Ranks(device=device), 1)
        grid.rank = grid.data_rank = rank
        grid.world_size = grid.data_size = size
        if group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            grid.group = group
            grid.mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
        return grid

    def sum_data(self, tensor: Tensor) -> Tensor:
        """Sum over data ranks, in place; the tensor may lie on the CPU."""
        return self._sum(tensor, None if self.mesh is None else self.mesh.get_group("data"))

    def sum_all(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self._sum(tensor, self.group)

    def _sum(self, tensor: Tensor, group: Any) -> Tensor:
        if self.mesh is None:
            return tensor
        there = tensor.to(self.device)
        dist.all_reduce(there, group=group)
        return tensor if there is tensor else tensor.copy_(there)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.barrier(group=self.group)


class Replicas:
    """Ranks that hold all modules whole, and sum gradients in one fixed order.

    Floating-point addition is not associative, so the sum over micro batches is always the same
    balanced binary tree over their numbers. A rank sums the subtree of its own block, the ranks'
    results are summed by the upper part of the tree. With a number of ranks that is a power of two
    and divides the number of micro batches, any number of ranks gives the same bits.

    Args:
        rank: Of this one.
        world_size: Ranks.
        device: Where this one computes.
        all_reduce: Sums a tensor over the ranks by :func:`sum_ranks`; needed for several.
    """

    tensor_size = 1
    mesh = None
    group = None

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        device: torch.device | str = "cpu",
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if world_size > 1 and all_reduce is None:
            raise ValueError("several ranks need a way to sum over them")
        self.rank = self.data_rank = rank
        self.world_size = self.data_size = world_size
        self.device = torch.device(device)
        self._all_reduce = all_reduce

    def tree_sum(self, count: int, leaf: Callable[[int], Tensor]) -> Tensor:
        """Sum what this rank computes in ``count`` micro batches, and the ranks' sums."""
        total = tree_sum(0, count, leaf)
        return total if self._all_reduce is None else self._all_reduce(total)

    def barrier(self) -> None:
        """They wait for each other in every sum."""


def tree_sum(first: int, last: int, leaf: Callable[[int], Tensor]) -> Tensor:
    """Sum ``leaf(first) … leaf(last - 1)`` as a balanced binary tree, from left to right; at most
    log2(last − first) + 1 sums are alive at once."""
    if last - first == 1:
        return leaf(first)
    middle = (first + last) // 2
    left = tree_sum(first, middle, leaf)
    return left.add_(tree_sum(middle, last, leaf))


def sum_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Sum the ranks' partial sums by the upper part of the same tree, where the first one lies."""
    device = parts[0].device
    return tree_sum(0, len(parts), lambda rank: parts[rank].to(device, copy=True))
