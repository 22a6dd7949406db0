"""Tensors on accelerators: shared on one device, by the vendor's library between two devices.

Channels and broadcasts, whose receivers are not known when the data are encoded, go through host
memory. **Not run**: written without an accelerator at hand; its tests carry the marker ``gpu``.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from rlinf.scheduler.accelerators import (
    AcceleratorType,
    AcceleratorUtil,
    CollectiveGroupOptions,
    process_device,
)
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
        self._announced: list[torch.Tensor] = []
        self.nbytes = 0
        """Of the message's tensors that stay on their device."""

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How to pickle a tensor; SchedulerValueError if it is not contiguous."""
        if not tensor.is_contiguous():
            raise SchedulerValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} must be contiguous "
                "when using P2P communication: call .contiguous() before sending"
            )
        if self._mode == "shared" and tensor.device.type == "cuda":
            self.nbytes += tensor.nbytes
            return _shared(tensor)
        if self._mode == "library":
            self.nbytes += tensor.nbytes
            self._announced.append(tensor)
            place, kind = self._outgoing().place, self._own.accelerator_type
            layout = tensor.dtype, tuple(tensor.shape), tensor.requires_grad
            return _receive, (place, kind, self._options, layout)
        return through_host(tensor)

    def restart(self) -> None:
        """Forget the message so far, which is encoded once more."""
        self._announced.clear()
        self.nbytes = 0

    def flush(self) -> None:
        """Send what was announced in the message, after the message."""
        for tensor in self._announced:
            self._outgoing().send(tensor)

    def _outgoing(self) -> Outgoing:
        names = (self._own.address.get_name(), self._peer.address.get_name())
        if names not in _outgoing:
            _outgoing[names] = Outgoing(self._own.accelerator_type, self._options)
        return _outgoing[names]


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
    """On the device of who receives it, where that is of the kind; else it stays on the host."""
    import torch

    # A worker's process says what it was given; a driver computes on what it sees.
    kind = os.environ.get("ACCELERATOR_TYPE")
    own = torch.device(process_device(AcceleratorType(kind) if kind else None))
    return data.to(own if own.type == device else "cpu").requires_grad_(requires_grad)


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


class Outgoing:
    """Tensors on their way to one worker, in order, from a thread and a stream of their own: the
    library sends no sooner than the other side receives, and of two workers that both send first
    neither would come to that."""

    def __init__(self, kind: Any, options: CollectiveGroupOptions | None) -> None:
        self.place = open_place()
        self._kind, self._options = kind, options
        self._waiting: SimpleQueue[tuple[torch.Tensor, Any]] = SimpleQueue()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name=f"sends at {self.place}", daemon=True).start()

    def send(self, tensor: torch.Tensor) -> None:
        """What the tensor holds now; SchedulerError where an earlier one could not be sent."""
        import torch

        from rlinf.processes.byte_layout import flat_bytes

        if self._failure is not None:
            raise SchedulerError(f"an earlier tensor could not be sent: {self._failure}")
        device: Any = torch.get_device_module(tensor.device)
        content = flat_bytes(tensor.detach()).clone()
        stream = device.Stream(device=tensor.device)
        stream.wait_stream(device.current_stream(tensor.device))
        self._waiting.put((content, stream))

    def _run(self) -> None:
        import torch

        try:
            group = process_group(self.place, 0, self._kind, self._options)
            while True:
                content, stream = self._waiting.get()
                device: Any = torch.get_device_module(content.device)
                with device.stream(stream):
                    group.send([content], 1, 0).wait()
                    sent = device.Event()
                    sent.record()
                sent.synchronize()  # until then nothing else may get the memory
        except Exception as error:  # noqa: BLE001 - whatever it is, the next send tells of it
            self._failure = error


def process_group(place: str, rank: int, kind: Any, options: CollectiveGroupOptions | None) -> Any:
    """Of a sender, rank 0, and a receiver, rank 1, that meet at a place."""
    import torch.distributed

    library: Any = torch.distributed
    store = meet(place, _MEETING_SECONDS)
    settings = AcceleratorUtil.get_accel_pg_options(kind, options)
    return library.ProcessGroupNCCL(store, rank, 2, settings or library.ProcessGroupNCCL.Options())


# Of this process: by pair for sending, by meeting place for receiving.
_outgoing: dict[tuple[str, str], Outgoing] = {}
_incoming: dict[str, Any] = {}


def _receive(
    place: str,
    kind: Any,
    options: Any,
    layout: tuple[torch.dtype, tuple[int, ...], bool],
) -> torch.Tensor:
    import torch

    from rlinf.processes.byte_layout import flat_bytes

    dtype, shape, requires_grad = layout
    tensor = torch.empty(shape, dtype=dtype, device=AcceleratorUtil.get_device_type(kind))
    if place not in _incoming:
        _incoming[place] = process_group(place, 1, kind, options)
    # As bytes: the library lacks several types of numbers.
    _incoming[place].recv([flat_bytes(tensor)], 0, 0).wait()
    return tensor.requires_grad_(requires_grad)
