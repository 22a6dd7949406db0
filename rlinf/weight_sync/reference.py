"""``reference``: receivers in the sender's process look at its tensors.

Legal where messages are passed by reference (the ``local`` runtime). A send returns when every
receiver has released the tensors, so that the sender cannot change them meanwhile; a receiver that
copies them between receive and release, or computes with them there, sees one version. A receiver
that goes on using them after its release shares them with the sender: that is legal while the two
take turns, as a trainer and an engine on the same devices do.
"""

from __future__ import annotations

from torch import Tensor

from rlinf.weight_sync.config import ReferenceConfig
from rlinf.weight_sync.errors import TornReadError, WeightSyncError
from rlinf.weight_sync.link import Header, Place, Request, agreed_dtypes
from rlinf.weight_sync.protocol import ReceivedWeights, Sent, WeightReceiver, WeightSender


class ReferenceSender(WeightSender[ReferenceConfig]):
    """Passes its tensors and waits until they are released."""

    def _send(self, weights: dict[str, Tensor], version: int, requests: list[Request]) -> Sent:
        own = Place.here(self._worker)
        if not own.in_process or any(request.place.process != own.process for request in requests):
            raise WeightSyncError(
                "a reference reaches only receivers in the process of the sender (cluster.runtime "
                "local); nearest: type `shared_memory` on one node, `bucket` elsewhere"
            )
        agreed_dtypes(weights, requests)
        self._link.header(version, weights)
        self._link.confirmations()
        return Sent(version=version, kind="reference")


class ReferenceReceiver(WeightReceiver[ReferenceConfig]):
    """Looks at the sender's tensors; one that needs another type is cast, and so copied."""

    _held: list[tuple[str, Tensor, int]] | None = None

    def _receive(self, header: Header) -> ReceivedWeights:
        given: dict[str, Tensor] = header.body
        self._held = [(name, tensor, _changes(tensor)) for name, tensor in given.items()]
        targets = self._targets or {}
        weights = {
            name: tensor.to(targets[name].dtype) if name in targets else tensor
            for name, tensor in given.items()
        }
        return ReceivedWeights(weights, header.version)

    def release(self) -> None:
        """Let the sender go on; a TornReadError where a tensor was changed meanwhile."""
        held, self._held = self._held, None
        if held is None:
            return
        changed = [name for name, tensor, count in held if _changes(tensor) != count]
        self._link.confirm()
        if changed:
            raise TornReadError(
                f"{len(changed)} weights of version {self.version} were changed in place before "
                f"they were released, such as {changed[0]}; train only after `send` has returned"
            )


def _changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version
