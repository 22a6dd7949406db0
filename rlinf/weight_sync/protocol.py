"""What every weight syncer does: one side sends a version, the other receives it.

Weights are tensors by name, whatever they belong to. A language model's go to its engine, a robot's
policy or another module takes them itself::

    sender = config.build_sender(worker, Parties(sender="actor", receiver="rollout", receivers=2))
    sender.send(policy.state_dict(), version)

    receiver = config.build_receiver(worker, parties, policy.state_dict())
    version = receiver.load_into(policy)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from rlinf.scheduler.errors import SchedulerError
from rlinf.weight_sync.config import WeightSyncConfig
from rlinf.weight_sync.errors import WeightSyncError
from rlinf.weight_sync.link import Header, Parties, ReceiverLink, Request, SenderLink

if TYPE_CHECKING:
    from rlinf.scheduler.worker import Worker

__all__ = ["Parties", "ReceivedWeights", "Sent", "WeightReceiver", "WeightSender", "Weights"]

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
ConfigT = TypeVar("ConfigT", bound=WeightSyncConfig)


class ReceivedWeights(NamedTuple):
    """All weights of one version, by name, as they were sent, in the receiver's types.

    For ``Module.load_state_dict``, and as ``weights.items()`` for ``Engine.update_weights``. They
    are valid until the receiver's next ``receive`` or ``release``, and not to be written to.
    """

    weights: dict[str, Tensor]
    version: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a send did.

    ``kind`` is how the weights went: ``reference``, ``shared_memory``, ``bucket`` or ``patch``;
    ``nothing`` on a rank that serves no receiver.
    """

    version: int
    kind: str
    nbytes: int = 0  # of weights and indices that went to each receiver
    density: float | None = None  # fraction of changed entries, where it was measured


class WeightSender(ABC, Generic[ConfigT]):
    """The sending side, inside a worker."""

    def __init__(self, config: ConfigT, worker: Worker, parties: Parties) -> None:
        self._config, self._worker = config, worker
        self._link = SenderLink(worker, parties)

    def send(self, weights: Weights, version: int) -> Sent:
        """Send all weights to the receivers that this rank serves.

        Every receiver has to call ``receive`` for it. The caller may change the weights in place
        as soon as this returns.

        Args:
            weights: Named tensors on any device; tensors that share their memory travel once.
            version: Their number.

        Raises:
            WeightSyncError: The update cannot be sent this way; receivers are told.
            SchedulerError: A receiver died, or did not ask within the deadline.
        """
        if not self._link.receivers:
            return Sent(version=version, kind="nothing")
        requests = self._requests()
        try:
            pairs = weights.items() if isinstance(weights, Mapping) else weights
            tensors = {name: tensor.detach() for name, tensor in pairs}
            return self._send(tensors, version, requests)
        except BaseException as error:
            self._link.abort(version, error)
            raise

    @property
    def takes_host_tensors(self) -> bool:
        """Whether weights travel through the memory of the host, so that they need not be whole on
        a device."""
        return False

    def _requests(self) -> list[Request]:
        return self._link.requests()

    @abstractmethod
    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent: ...

    def close(self) -> None:
        """Give back what the sender holds."""


class WeightReceiver(ABC, Generic[ConfigT]):
    """The receiving side, inside a worker; see :meth:`WeightSyncConfig.build_receiver`."""

    def __init__(
        self,
        config: ConfigT,
        worker: Worker,
        parties: Parties,
        targets: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._config, self._worker, self._parties = config, worker, parties
        self._link = ReceiverLink(worker, parties)
        self._targets = targets
        self.version: int | None = None
        """Version of the last update that arrived completely."""

    def receive(self) -> ReceivedWeights:
        """Wait for the next update.

        Raises:
            WeightSyncError: The update did not arrive completely: the sender failed or died. Then
                :attr:`version` and what was loaded before stay as they were.
        """
        self.release()
        try:
            update = self._receive(self._open())
        except (SchedulerError, WeightSyncError) as error:
            self._withdraw()
            kept = "without weights" if self.version is None else f"at version {self.version}"
            text = f"no weights from {self._link.sender_name}: {error}; the receiver stays {kept}"
            kind = type(error) if isinstance(error, WeightSyncError) else WeightSyncError
            raise kind(text) from error
        self.version = update.version
        return update

    def apply(self, load: Callable[[dict[str, Tensor], int], Any]) -> int:
        """Receive, load and release; returns the version.

        ``load`` keeps no reference to the weights, such as
        ``lambda weights, version: engine.update_weights(weights.items(), version)``.
        """
        update = self.receive()
        try:
            load(update.weights, update.version)
        finally:
            self.release()
        return update.version

    def load_into(self, module: nn.Module) -> int:
        """Receive into a module, such as a robot's policy; returns the version.

        The module is changed when an update has arrived completely, and only by the thread that
        calls this: whoever acts with it on that thread never acts with parts of two versions.
        """
        return self.apply(lambda weights, _: module.load_state_dict(weights))

    def release(self) -> None:
        """Say that the tensors of the last update are not looked at any more."""

    def close(self) -> None:
        """Give back what the receiver holds."""
        self.release()

    def _open(self) -> Header:
        self._ask()
        return self._link.header()

    def _withdraw(self) -> None:
        """Let the next update be no answer to what was asked."""
        self._link.withdraw()

    def _ask(self) -> None:
        targets = (self._targets or {}).items()
        self._link.ask(self._base(), {name: (tuple(t.shape), t.dtype) for name, t in targets})

    def _base(self) -> Any:
        """Snapshot that this receiver's weights equal."""
        return None

    @abstractmethod
    def _receive(self, header: Header) -> ReceivedWeights: ...
