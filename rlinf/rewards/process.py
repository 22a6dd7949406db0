"""A process of the reward pool: builds the functions, then scores sample by sample.

Scoring happens in the main thread, because some libraries limit their time by signals. Imports no
torch unless a user's function does.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
from typing import Any

from rlinf.processes.supervised import serve
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import RewardInput
from rlinf.rewards.scorer import Scorer


def main(lifeline: int, commands: int, progress: int) -> None:
    """Serve one pool until it goes away.

    Args:
        lifeline: See :func:`~rlinf.processes.supervised.serve`, like ``commands``.
        commands: Descriptor of the socket to the pool.
        progress: Descriptor of a file that holds the number of the function at work, for the case
            that it never ends.
    """
    serve(lifeline, commands, _Server(progress).answer)


class _Server:
    """The functions, once they are built."""

    def __init__(self, progress: int) -> None:
        self._progress = progress
        self._scorer: Scorer

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Build the functions, or score a sample."""
        if message["operation"] == "score":
            sample = RewardInput(**message["sample"])
            return {"output": dataclasses.asdict(self._scorer.score(sample))}
        if message["operation"] == "start":
            config = RewardConfig.model_validate(message["config"])
            if config.memory_mib is not None:
                _limit_memory(config.memory_mib * 2**20)
            self._scorer = Scorer(config, at=self._note)
            gc.collect()
            gc.freeze()
        return {}

    def _note(self, number: int) -> None:
        os.pwrite(self._progress, bytes([number]), 0)


def _limit_memory(limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
