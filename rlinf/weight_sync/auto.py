"""``auto``: the cheapest syncer that reaches all receivers, chosen at the first update."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from rlinf.scheduler.process import require_process
from rlinf.weight_sync.config import (
    AutoConfig,
    PatchConfig,
    ReferenceConfig,
    SharedMemoryConfig,
    WeightSyncConfig,
)
from rlinf.weight_sync.errors import NoSharedMemoryError
from rlinf.weight_sync.link import Header, Place, Request
from rlinf.weight_sync.protocol import (
    ReceivedWeights,
    Sent,
    WeightReceiver,
    Weights,
    WeightSender,
)
from rlinf.weight_sync.shared_memory import SharedMemorySender

log = logging.getLogger(__name__)
_UNKNOWN = -1  # the choice of a syncer has no version


def choose(config: AutoConfig, own: Place, others: list[Place]) -> WeightSyncConfig:
    """The syncer for receivers at these places."""
    if own.in_process and all(place.process == own.process for place in others):
        return ReferenceConfig()
    if all(place.node == own.node for place in others):
        return SharedMemoryConfig(reads=config.reads)
    return _patch(config)


def _patch(config: AutoConfig) -> PatchConfig:
    """The syncer that reaches any receiver."""
    settings = {key: getattr(config, key) for key in PatchConfig.model_fields if key != "type"}
    return PatchConfig(**settings)


class AutoSender(WeightSender[AutoConfig]):
    """Chooses when it knows where the receivers are, tells them, and is the chosen one then."""

    _chosen: WeightSender[Any] | None = None

    @property
    def takes_host_tensors(self) -> bool:
        """See :attr:`WeightSender.takes_host_tensors`; references are of one process alone."""
        if self._chosen is None:
            return require_process().runtime != "local"
        return self._chosen.takes_host_tensors

    def send(self, weights: Weights, version: int) -> Sent:
        """See :meth:`WeightSender.send`; before the first one, choose by what it has to send."""
        if self._chosen is None and self._link.receivers:
            weights = dict(weights)
            requests = super()._requests()
            try:
                chosen = self._choice(weights, requests)
            except BaseException as error:
                self._link.abort(version, error)
                raise
            self._link.header(_UNKNOWN, chosen._config)
            self._chosen, self._link = chosen, chosen._link
        return super().send(weights, version)

    def _choice(self, weights: dict[str, Tensor], requests: list[Request]) -> WeightSender[Any]:
        """The sender that reaches who asked, and has the memory that it needs."""
        places = [request.place for request in requests]
        parties, config = self._link.parties, choose(self._config, Place.here(self._worker), places)
        chosen = config.build_sender(self._worker, parties)
        if isinstance(chosen, SharedMemorySender):
            try:
                chosen.reserve(weights, requests)
            except NoSharedMemoryError as error:
                chosen.close()
                log.warning("weights travel as messages, which is slower: %s", error)
                return _patch(self._config).build_sender(self._worker, parties)
        return chosen

    def _requests(self) -> list[Request]:
        assert self._chosen is not None  # `send` has built it
        return self._chosen._requests()

    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent:
        assert self._chosen is not None  # `send` has built it
        return self._chosen._send(weights, version, requests)

    def close(self) -> None:
        """Close the chosen syncer."""
        if self._chosen is not None:
            self._chosen.close()


class AutoReceiver(WeightReceiver[AutoConfig]):
    """Is told which syncer was chosen, and is that one then."""

    _chosen: WeightReceiver[Any] | None = None

    def _open(self) -> Header:
        if self._chosen is None:
            config: WeightSyncConfig = super()._open().body
            self._chosen = config.build_receiver(self._worker, self._parties, self._targets)
        return self._chosen._open()

    def _withdraw(self) -> None:
        if self._chosen is None:
            super()._withdraw()
        else:
            self._chosen._withdraw()

    def _receive(self, header: Header) -> ReceivedWeights:
        assert self._chosen is not None  # `_open` has built it
        update = self._chosen._receive(header)
        self._chosen.version = update.version
        return update

    def release(self) -> None:
        """See :meth:`WeightReceiver.release`."""
        if self._chosen is not None:
            self._chosen.release()

    def close(self) -> None:
        """Close the chosen syncer."""
        if self._chosen is not None:
            self._chosen.close()
