"""Workers that the tests launch."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from rlinf.scheduler import Worker
from rlinf.scheduler.process import require_process
from rlinf.weight_sync.config import WeightSyncConfig
from rlinf.weight_sync.link import Part
from rlinf.weight_sync.protocol import Parties, WeightReceiver, WeightSender

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


def bits(weights: dict[str, torch.Tensor]) -> Bits:
    """What the weights are, comparable bit by bit."""
    return {
        name: (
            str(t.dtype),
            tuple(t.shape),
            t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in weights.items()
    }


def policy() -> torch.nn.Module:
    """Layers, buffers of floats and integers, and two names for one weight."""
    first, last = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
    last.weight = first.weight
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(7), first, torch.nn.Tanh(), torch.nn.Unflatten(1, (5, 1)), last
    )


class Peer(Worker):
    """Either side of a synchronisation."""

    _dies_at: int | None = None

    def open_sender(self, config: WeightSyncConfig, parties: Parties) -> None:
        self._syncer: Any = config.build_sender(self, parties)

    def open_receiver(
        self,
        config: WeightSyncConfig,
        parties: Parties,
        targets: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._targets = targets
        self._syncer = config.build_receiver(self, parties, targets)

    def send_weights(self, weights: dict[str, torch.Tensor], version: int) -> Any:
        sender: WeightSender[Any] = self._syncer
        return sender.send(weights, version)

    def send_without_memory(self, weights: dict[str, torch.Tensor], version: int) -> Any:
        """Send where shared memory is full."""
        full = OSError(errno.ENOSPC, "No space left on device")
        with patch("os.posix_fallocate", side_effect=full):
            return self._syncer.send(weights, version)

    def send_changing(self, weights: dict[str, torch.Tensor], count: int) -> list[Any]:
        """Send versions 0.., adding 1 in place after each send."""
        sent = []
        for version in range(count):
            sent.append(self._syncer.send(weights, version))
            for tensor in weights.values():
                tensor.add_(1)
        return sent

    def fail_to_send(self, weights: dict[str, torch.Tensor], version: int) -> str:
        """What was raised where there was no room for the changes that were found."""
        with patch("rlinf.weight_sync.patch.encode", side_effect=MemoryError("no room")):
            try:
                self._syncer.send(weights, version)
            except MemoryError as error:
                return str(error)
        return "nothing"

    def receive_bits(self) -> tuple[Bits, int, Any]:
        receiver: WeightReceiver[Any] = self._syncer
        found: list[Bits] = []
        version = receiver.apply(lambda weights, _: found.append(bits(weights)))
        return found[0], version, receiver.version

    def open_policy(self, config: WeightSyncConfig, parties: Parties, *, sends: bool) -> None:
        """Build a policy with weights of its own, and this side of a synchronisation of it."""
        torch.manual_seed(self._rank + 10 * sends)
        self._policy = policy()
        self._syncer = (
            config.build_sender(self, parties)
            if sends
            else config.build_receiver(self, parties, self._policy.state_dict())
        )

    def train_and_send(self, version: int) -> Bits:
        """Change every tensor of the policy and send it; what was sent."""
        with torch.no_grad():
            for tensor in self._policy.state_dict().values():
                tensor.add_(1 + version)
        self._syncer.send(self._policy.state_dict(), version)
        return bits(self._policy.state_dict())

    def load_policy(self) -> tuple[int, Bits]:
        version = self._syncer.load_into(self._policy)
        return version, bits(self._policy.state_dict())

    def receive_several(self, count: int) -> list[tuple[set[float], int]]:
        seen = []
        for _ in range(count):
            weights, version = self._syncer.receive()
            seen.append(({float(v) for t in weights.values() for v in t.unique()}, version))
            self._syncer.release()
        return seen

    def receive_failing(self) -> tuple[str, str, Any, Bits]:
        """What a receive raised, the version after it, and what was received before."""
        before = self._syncer.receive()
        copies = {name: tensor.clone() for name, tensor in before.weights.items()}
        self._syncer.release()
        return (*self.fail_to_receive(), bits(copies))

    def fail_to_receive(self) -> tuple[str, str, Any]:
        """What a receive raised, and the version after it."""
        try:
            self._syncer.receive()
        except Exception as error:  # noqa: BLE001 - its text is the result
            return type(error).__name__, str(error), self._syncer.version
        return "nothing", "", self._syncer.version

    def receive_in_vain(self) -> tuple[str, str, Any]:
        """What a receive raised that nobody sent anything for."""
        with patch.object(require_process(), "deadline_seconds", 0.2):
            return self.fail_to_receive()

    def ask_in_vain(self) -> None:
        """Ask for weights, and wait no longer."""
        self._syncer._ask()
        self._syncer._withdraw()

    def tied(self) -> bool:
        weights, _ = self._syncer.receive()
        same = weights["a"].data_ptr() == weights["b"].data_ptr()
        self._syncer.release()
        return same

    def target_bits(self) -> Bits:
        return bits(self._targets or {})

    def latest(self) -> Any:
        update = self._syncer.latest()
        return None if update is None else (update.version, bits(update.weights))

    def forget_base(self, number: int) -> None:
        """Let the receiver claim to have other weights than it has."""
        self._syncer._held = replace(self._syncer._held, number=number)

    def claim_base(self) -> None:
        """Let the receiver have an older version and ask for a patch on the newest."""
        claimed = self._syncer._held
        self._syncer._held = replace(claimed, number=claimed.number - 1, version=5)
        self._syncer._base = lambda: claimed

    def honest(self) -> None:
        del self._syncer._base

    def change_while_held(self) -> str:
        weights, _ = self._syncer.receive()
        next(iter(weights.values())).add_(1)
        try:
            self._syncer.release()
        except Exception as error:  # noqa: BLE001 - its text is the result
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def die_at_part(self, number: int) -> None:
        """End in the middle of an update: the process, or on the local runtime the call."""
        self._dies_at = number
        self._parts = 0

    def broadcast(self, object: Any = None, *arguments: Any, **options: Any) -> Any:
        if isinstance(object, Part) and self._dies_at is not None:
            self._parts += 1
            if self._parts == self._dies_at:
                if require_process().runtime == "ray":
                    os.kill(os.getpid(), signal.SIGKILL)
                self._dies_at = None
                raise RuntimeError("a device failed")
        return super().broadcast(object, *arguments, **options)

    def process_id(self) -> int:
        return os.getpid()

    def close_syncer(self) -> None:
        self._syncer.close()
