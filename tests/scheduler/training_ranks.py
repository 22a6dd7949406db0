"""Ranks that meet as those of a trainer do."""

from __future__ import annotations

import os

import torch

from rlinf.trainers.ranks import Grid
from rlinf.workers.training_ranks import TrainingWorker
from tests.scheduler.test_rendezvous import listening


class Rank(TrainingWorker):
    """Meets the others, exchanges a number with them, and sees where it listens since."""

    before: set[tuple[str, int]]

    def meeting(self) -> str:
        self.before = listening()
        return super().meeting()

    def join(self, place: str) -> tuple[float, set[tuple[str, int]], str | None]:
        before = getattr(self, "before", None) or listening()
        total = Grid(self._meet(place), 1).sum_all(torch.tensor(self._rank + 1.0))
        found = listening() - before
        self.close()
        return float(total), found, os.environ.get("GLOO_SOCKET_IFNAME")
