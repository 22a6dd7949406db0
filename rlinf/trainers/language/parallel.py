"""The processes that train one model together, and what they exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlinf.scheduler.accelerators import collective_backend


class Ranks:
    """The processes that train together; one process needs no process group.

    A process group that the caller has made already is used as it is.

    Args:
        rank: Of this process.
        world_size: Processes.
        device: Where this process computes.
        store: torch's key-value store at which several processes meet, for example that of
            :func:`rlinf.scheduler.rendezvous.meet`.
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
        if world_size > 1:
            self._meet(store, timeout_s)

    def _meet(self, store: Store | None, timeout_s: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group(
                collective_backend(str(self.device)),
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            self._owns_group = True
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"the process group has {dist.get_world_size()} ranks, not {self.world_size}"
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
    """

    def __init__(self, ranks: Ranks, tensor_size: int) -> None:
        self.rank, self.world_size, self.device = ranks.rank, ranks.world_size, ranks.device
        self.tensor_size = tensor_size
        self.data_size = ranks.world_size // tensor_size
        self.data_rank = ranks.rank // tensor_size
        self.mesh: Any = None
        self._group: Any = None
        if ranks.world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh(
                self.device.type, (self.data_size, tensor_size), mesh_dim_names=("data", "tensor")
            )

    @classmethod
    def over(cls, group: Any, *, rank: int, size: int, device: torch.device) -> Grid:
        """Data ranks 0 to ``size`` − 1 of a process group that holds them alone.

        Args:
            group: The group; None for one rank.
            rank: Of this process.
            size: Ranks.
            device: Where this process computes.
        """
        grid = cls(Ranks(device=device), 1)
        grid.rank = grid.data_rank = rank
        grid.world_size = grid.data_size = size
        if group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            grid._group = group
            grid.mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("data",))
        return grid

    @property
    def group(self) -> Any:
        """Process group of all its ranks; None: that of all processes, or there is one."""
        return self._group

    def sum_data(self, tensor: Tensor) -> Tensor:
        """Sum over data ranks, in place; the tensor may lie on the CPU."""
        return self._sum(tensor, "data")

    def sum_all(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self._sum(tensor, None)

    def _sum(self, tensor: Tensor, dimension: str | None) -> Tensor:
        if self.mesh is None:
            return tensor
        group = self._group if dimension is None else self.mesh.get_group(dimension)
        there = tensor.to(self.device)
        dist.all_reduce(there, group=group)
        return tensor if there is tensor else tensor.copy_(there)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.barrier(group=self._group)
