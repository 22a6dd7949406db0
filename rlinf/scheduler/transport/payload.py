"""Turning objects into frames and back, by pickle protocol 5.

CPU tensors and arrays are copied into the pickle if small; else into a shared-memory block, or a
frame of their own where the receiver is on another node or shared memory is full.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.scheduler.errors import SchedulerTypeError
from rlinf.scheduler.transport.blocks import (
    MOST_RECEIVERS,
    AttachedBlocks,
    Block,
    BlockPool,
    process_number,
)

if TYPE_CHECKING:
    import torch

    from rlinf.scheduler.transport.accelerator import PairTransfer

LARGE_BYTES = 64 * 1024

Frame = bytes | bytearray | memoryview


class _NotImportableError(Exception):
    """A class or function that the receiver could not import (``__main__``, closures)."""


_BY_VALUE = (_NotImportableError, pickle.PicklingError, AttributeError, TypeError)


@dataclass(slots=True)
class Payload:
    """One object on its way: frames between processes, a reference within one."""

    frames: Sequence[Frame] | None = None
    reference: Any = field(default=None, kw_only=True)
    blocks: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of those that its tensors and arrays are in."""
    nbytes: int = field(default=0, kw_only=True)


class _Decoding(threading.local):
    """What the rebuild functions of a pickle need to know about the decode in progress."""

    attached: AttachedBlocks
    receiver: int = 0
    private: bool = False
    keep_claimed: bool = False


_decoding = _Decoding()


class Codec:
    """Encodes and decodes payloads for one process, of a node."""

    def __init__(self, pool: BlockPool, node_rank: int = 0) -> None:
        self._pool = pool
        self._attached = AttachedBlocks(process_number(node_rank, os.getpid()))

    def encode(
        self,
        value: Any,
        *,
        receivers: int = 1,
        owners: Sequence[int] = (),
        inline: bool = False,
        pair: PairTransfer | None = None,
    ) -> Payload:
        """Encode a value.

        Args:
            value: What to send.
            receivers: How many will decode it.
            owners: The number of the process of each, where that is known now, so that shared
                memory is given back where one ends before it has decoded.
            inline: Use no shared memory, because a receiver is on another node.
            pair: How accelerator tensors go, where the receiver is known.

        Raises:
            SchedulerTypeError: It holds what cannot be pickled, such as a lock or a generator, or
                is nested too deeply.
        """
        pool = None if inline or receivers > MOST_RECEIVERS else self._pool
        state = _Encoding(pool, receivers, owners, pair)
        try:
            try:
                head = _dump(_FastPickler, value, state)
            except _BY_VALUE:
                state.release()
                state = _Encoding(pool, receivers, owners, pair)
                head = _dump(_by_value_pickler(), value, state)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            state.release()
            raise not_sendable(error) from error
        except BaseException:
            state.release()
            raise
        frames: list[Frame] = [head, *(buffer.raw() for buffer in state.buffers)]
        nbytes = sum(len(frame) for frame in frames) + sum(b.capacity for b in state.blocks)
        return Payload(frames, blocks=tuple(block.name for block in state.blocks), nbytes=nbytes)

    def decode(
        self, payload: Payload, *, receiver: int = 0, receivers: int = 1, peek: bool = False
    ) -> Any:
        """Rebuild the value.

        Args:
            payload: What arrived.
            receiver: Which of the receivers this is.
            receivers: How many there are; several get copies, one gets the memory itself.
            peek: Look only: shared memory stays claimed for the real receiver.
        """
        if payload.frames is None:
            return payload.reference
        _decoding.attached, _decoding.receiver = self._attached, receiver
        _decoding.private, _decoding.keep_claimed = receivers > 1 or peek, peek
        head, *buffers = payload.frames
        return pickle.loads(head, buffers=[_writable(buffer) for buffer in buffers])

    def without_blocks(self, payload: Payload) -> Payload:
        """The same payload for a receiver on another node."""
        return self.encode(self.decode(payload), inline=True) if payload.blocks else payload


def not_sendable(error: Exception) -> SchedulerTypeError:
    """What to raise where a value was too deep, or could not be pickled."""
    # cloudpickle makes another error of a recursion that is too deep.
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return SchedulerTypeError(
            "what another worker is given is nested too deeply to be sent: lists and mappings may "
            f"lie at most about {sys.getrecursionlimit() // 2} deep in each other, and other "
            "objects less. Give a list of its parts, which refer to each other by number."
        )
    return SchedulerTypeError(
        f"what another process is given has to be picklable, and a part of it is not: {error}. "
        "Leave that part out, or make it where it is used."
    )


def _writable(buffer: Frame) -> bytearray:
    return buffer if isinstance(buffer, bytearray) else bytearray(buffer)


@dataclass(slots=True)
class _Encoding:
    """What one encode may use, and has used so far."""

    pool: BlockPool | None = None
    receivers: int = 1
    owners: Sequence[int] = ()
    pair: PairTransfer | None = None
    buffers: list[pickle.PickleBuffer] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Callback of pickle: small buffers stay in the pickle, large ones become frames."""
        with buffer.raw() as raw:
            small = raw.nbytes < LARGE_BYTES
        if not small:
            self.buffers.append(buffer)
        return small

    def release(self) -> None:
        """Give the blocks of an encode that did not finish back."""
        for block in self.blocks:
            block.claim(0)
        if self.pair is not None:
            self.pair.restart()

    def reduce(self, value: Any) -> Any:
        """How to pickle a tensor, an array, a class or a function; NotImplemented for the rest."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._reduce_tensor(value)
        if type(value) is np.ndarray and value.nbytes >= LARGE_BYTES and not value.dtype.hasobject:
            return self._reduce_array(value)
        return NotImplemented

    def _reduce_array(self, value: np.ndarray[Any, Any]) -> Any:
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        block = self.pool and self.pool.allocate(value.nbytes, self.receivers, self.owners)
        if not block:
            return NotImplemented
        self.blocks.append(block)
        target = block.data(value.nbytes).view(value.dtype).reshape(value.shape, order=order)
        np.copyto(target, value)
        return _array_from_block, (block.name, value.nbytes, value.dtype, value.shape, order)

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        import torch

        if value.device.type != "cpu":
            from rlinf.scheduler.transport.accelerator import through_host

            return self.pair.reduce(value) if self.pair else through_host(value)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        source = value.detach().resolve_conj().resolve_neg()
        parameter = type(value) is not torch.Tensor
        kind = (value.dtype, tuple(value.shape), value.requires_grad, parameter)
        nbytes = source.numel() * source.element_size()
        if nbytes < LARGE_BYTES:
            return _tensor, (_bytes_of(source).tobytes(), *kind)
        block = self.pool and self.pool.allocate(nbytes, self.receivers, self.owners)
        if not block:
            return _tensor, (pickle.PickleBuffer(_bytes_of(source).data), *kind)
        self.blocks.append(block)
        target = torch.from_numpy(block.data(nbytes)).view(value.dtype).reshape(value.shape)
        target.copy_(source)
        return _tensor, ((block.name, nbytes), *kind)


def _reduce_once(value: Any) -> Any:
    """How to pickle an instance whose class arrived by value and says that it has slots.

    cloudpickle rebuilds such a class without them. What its instances hold is then in a
    ``__dict__``, and pickle, which asks the class for its slots, finds everything twice; the class
    as it was written has no ``__dict__`` to take that.
    """
    slotted = any(vars(each).get("__slots__") for each in type(value).__mro__)
    if isinstance(value, type) or not slotted or not hasattr(value, "__dict__"):
        return NotImplemented
    reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return NotImplemented
    match reduced[2]:
        case (dict() as held, dict() as slots) if held.keys() & slots.keys():
            other = {name: each for name, each in held.items() if name not in slots}
            return (*reduced[:2], (other or None, slots), *reduced[3:])
    return NotImplemented


class _FastPickler(pickle.Pickler):
    """The C pickler; gives up on what the receiver could not import."""

    state: _Encoding

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
                raise _NotImportableError
            return NotImplemented
        return self.state.reduce(value)


@cache
def _by_value_pickler() -> Any:
    """cloudpickle with the same treatment of tensors and arrays.

    It is Ray's copy, by which the workers' classes travel: a copy keeps account of the classes that
    arrived by value, and from two of them a class would arrive as two.
    """
    from ray import cloudpickle

    class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        state: _Encoding

        def reducer_override(self, value: Any) -> Any:
            reduced = self.state.reduce(value)
            if reduced is NotImplemented:
                reduced = _reduce_once(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValuePickler


def _dump(pickler_class: Any, value: Any, state: _Encoding) -> bytes:
    stream = io.BytesIO()
    pickler = pickler_class(stream, protocol=5, buffer_callback=state.keep_in_band)
    pickler.state = state
    pickler.dump(value)
    return stream.getvalue()


def dumps(value: Any) -> bytes:
    """Pickle something small, by value where the receiver could not import it."""
    try:
        return _dump(_FastPickler, value, _Encoding())
    except _BY_VALUE:
        return _dump(_by_value_pickler(), value, _Encoding())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    from rlinf.processes.byte_layout import flat_bytes

    array: np.ndarray[Any, Any] = flat_bytes(tensor).numpy()
    return array


def _block_bytes(name: str, nbytes: int) -> np.ndarray[Any, Any]:
    if not _decoding.private:
        return _decoding.attached.view(name, nbytes, _decoding.receiver)
    data = _decoding.attached.copy(name, nbytes)
    if not _decoding.keep_claimed:
        _decoding.attached.release(name, _decoding.receiver)
    return data


def _array_from_block(name: str, nbytes: int, dtype: Any, shape: Any, order: Any) -> Any:
    return _block_bytes(name, nbytes).view(dtype).reshape(shape, order=order)


def _tensor(data: Any, dtype: Any, shape: Any, requires_grad: bool, parameter: bool) -> Any:
    """A tensor of what is in a block, given by name and size, or of bytes."""
    import torch

    if isinstance(data, tuple):
        flat = torch.from_numpy(_block_bytes(*data))
    elif len(memoryview(data)) == 0:
        flat = torch.empty(0, dtype=torch.uint8)
    else:
        flat = torch.frombuffer(_writable(data), dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
