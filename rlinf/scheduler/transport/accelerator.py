"""Tensors on accelerators: shared on one device, by the vendor's library between two devices.

Channels and broadcasts, whose receivers are not known when the data are encoded, go through host
memory. **Not run**: written without an accelerator at hand; its tests carry the marker ``gpu``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from rlinf.scheduler.accelerators import AcceleratorUtil, CollectiveGroupOptions
from rlinf.scheduler.address import WorkerInfo
from rlinf.scheduler.errors import SchedulerError, SchedulerValueError
from rlinf.scheduler.transport.rendezvous import meet, open_place

if TYPE_CHECKING:
    import torch

Mode = Literal["shared", "library", "host"]

_STORAGE_DEVICE = 6  # position of the device number in torch's arguments of rebuild_cuda_tensor
_MEETING_SECONDS = 300.0


class PairTransfer:
    """How the accelerator tensors of one message go to one worker.

    Of the options only those of a pair's first message count.
    """

    def __init__(
        self, own: WorkerInfo, peer: WorkerInfo, options: CollectiveGroupOptions | None
    ) -> None:
        self._own = own
        self._peer = peer
        self._options = options
        self._mode = transfer_mode(own, peer)
        self._queued: list[torch.Tensor] = []

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How to pickle a tensor; SchedulerValueError if it is not contiguous."""
        if not tensor.is_contiguous():
            raise SchedulerValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} must be contiguous "
                "when using P2P communication: call .contiguous() before sending"
            )
        if self._mode == "shared" and tensor.device.type == "cuda":
            return _shared(tensor)
        if self._mode == "library":
            self._queued.append(tensor)
            place = self._communicator().place
            kind = self._own.accelerator_type
            return _receive, (place, kind, self._options, tensor.dtype, tuple(tensor.shape))
        return through_host(tensor)

    def flush(self) -> None:
        """Send what was announced in the message, after the message."""
        for tensor in self._queued:
            self._communicator().send(tensor)

    def _communicator(self) -> Communicator:
        names = (self._own.address.get_name(), self._peer.address.get_name())
        if names not in _communicators:
            kind = self._own.accelerator_type
            _communicators[names] = Communicator(open_place(), 0, kind, self._options)
        return _communicators[names]


def transfer_mode(own: WorkerInfo, peer: WorkerInfo) -> Mode:
    """How accelerator tensors go between two workers: a memory handle (CUDA IPC) where both are on
    the same single device, a library of the NCCL interface between alike devices of one vendor.
    """
    mine, theirs = own.available_accelerators, peer.available_accelerators
    if mine == theirs and len(mine) == 1:
        return "shared"
    kind = own.accelerator_type
    alike = (kind, own.accelerator_model) == (peer.accelerator_type, peer.accelerator_model)
    apart = bool(mine and theirs) and set(mine).isdisjoint(theirs)
    backend = AcceleratorUtil.get_ccl_backend(kind)
    supported = kind in AcceleratorUtil.CCL_SUPPORT_LIST and backend == "nccl"
    return "library" if alike and apart and supported else "host"


def through_host(tensor: torch.Tensor) -> Any:
    """Pickle an accelerator tensor by way of the CPU; it lands on the receiver's device."""
    return _to_device, (tensor.detach().cpu(), tensor.device.type, tensor.requires_grad)


def _to_device(data: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return data.to(device).requires_grad_(requires_grad)


def _shared(tensor: torch.Tensor) -> Any:
    """A handle to a copy on the device: the sender may go on changing its own tensor."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    copy = tensor.detach().clone()
    rebuild, arguments = reduce_tensor(copy)  # type: ignore[no-untyped-call]
    return _open_shared, (uuid, rebuild, arguments, tensor.requires_grad)


def _open_shared(uuid: str, rebuild: Any, arguments: Any, requires_grad: bool) -> Any:
    own = list(arguments)
    own[_STORAGE_DEVICE] = _device_number(uuid)
    return rebuild(*own).requires_grad_(requires_grad)


@cache
def _device_number(uuid: str) -> int:
    """The number that this process has for a device; processes may see different sets."""
    import torch

    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise SchedulerError(f"this process does not see the device {uuid} of the sender")


class Communicator:
    """A process group of a sender, rank 0, and a receiver that meet at a place."""

    def __init__(
        self, place: str, rank: int, kind: Any, options: CollectiveGroupOptions | None
    ) -> None:
        import torch.distributed

        library: Any = torch.distributed
        self.place = place
        self._rank = rank
        store = meet(place, _MEETING_SECONDS)
        settings = (
            AcceleratorUtil.get_accel_pg_options(kind, options)
            or library.ProcessGroupNCCL.Options()
        )
        self._group: Any = library.ProcessGroupNCCL(store, rank, 2, settings)

    def send(self, tensor: torch.Tensor) -> None:
        """Send on the current stream."""
        self._group.send([tensor.detach()], 1, 0).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive on the current stream."""
        self._group.recv([tensor], 0, 0).wait()


# Of this process: by pair for sending, by meeting place for receiving.
_communicators: dict[Any, Communicator] = {}


def _receive(place: str, kind: Any, options: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    tensor = torch.empty(shape, dtype=dtype, device=AcceleratorUtil.get_device_type(kind))
    if place not in _communicators:
        _communicators[place] = Communicator(place, 1, kind, options)
    _communicators[place].receive(tensor)
    return tensor
