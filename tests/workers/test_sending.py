"""What the ranks of a language actor do when its weights are sent."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.workers.language_actor import LanguageActorWorker

COUNT, VERSION = 5, 3


class Gathering:
    """A trainer that gathers tensors, and knows how many of them existed at a time."""

    version = VERSION
    gives_copies = True

    def __init__(self) -> None:
        self.gathered = self.most = 0
        self._there: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for number in range(COUNT):
            tensor = torch.full((2,), float(number))
            self._there.add(tensor)
            self.gathered += 1
            self.most = max(self.most, len(self._there))
            yield f"weight {number}", tensor
            del tensor


class Sender:
    takes_host_tensors = True

    def __init__(self) -> None:
        self.sent: dict[str, Tensor] = {}

    def send(self, weights: dict[str, Tensor], version: int) -> None:
        assert version == VERSION
        self.sent = dict(weights)


@pytest.mark.parametrize("sends", [True, False])
def test_only_the_rank_that_sends_keeps_what_is_gathered(sends: bool) -> None:
    worker: Any = object.__new__(LanguageActorWorker)
    trainer, sender = Gathering(), Sender()
    worker._trainer, worker._hook = trainer, None
    worker._weights = sender if sends else None
    assert worker.send_weights() == VERSION
    assert trainer.gathered == COUNT
    assert trainer.most == (COUNT if sends else 1)
    assert [float(tensor[0]) for tensor in sender.sent.values()] == list(range(5 if sends else 0))
