"""States of simulators that are kept on the way, so that a crash repeats few actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf.envs.base import SimulatorEnv
from rlinf.envs.supervised.block import Status
from rlinf.processes.shared_block import SharedBlock
from rlinf.processes.wire import encode_tree

REPEATED_SECONDS = 1.0
"""Of steps that a crash repeats at the most, beside the chunk in flight: fast simulators give no
state on the way, and slow ones one for so many steps that it costs next to nothing."""


class StateKeeper:
    """In an env process: takes the state of an env once its steps have taken so long."""

    def __init__(self, block: SharedBlock) -> None:
        self._block = block
        self._seconds: dict[int, float] = {}
        self._taken: dict[str, np.ndarray] = {}

    def stepped(self, row: int, env: SimulatorEnv, seconds: float) -> None:
        """A chunk of ``row`` took so long."""
        spent = self._seconds[row] = self._seconds.get(row, 0.0) + seconds
        if spent < REPEATED_SECONDS:  # nearly always
            return
        self._seconds[row] = 0.0
        if self._block["steps"][row] and self._block["status"][row] == Status.RUNNING:
            state = encoded_state(env)
            if state is not None:
                self._taken[str(row)] = state

    def take(self) -> dict[str, np.ndarray]:
        """By row the states that were taken since the last call."""
        taken, self._taken = self._taken, {}
        return taken


class KeptStates:
    """Beside the env processes: the last state of each row, while its episode runs."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}

    def clear(self) -> None:
        """Forget them: the envs go on from elsewhere."""
        self._states.clear()

    def keep(self, block: SharedBlock, states: Mapping[Any, np.ndarray]) -> None:
        """Keep states by row, which are of where the block says that the rows are."""
        for name, state in states.items():
            row = int(name)
            where = {each: int(block[each][row]) for each in ("serial", "steps")}
            self._states[row] = {**where, "state": state}

    def order(self, block: SharedBlock, row: int) -> dict[str, Any]:
        """The ``state`` that a row is rebuilt from and the ``steps`` that led there; empty where
        there is none of its episode."""
        kept = self._states.get(row)
        if kept is None or kept["serial"] != block["serial"][row]:
            return {}
        return {name: kept[name] for name in ("state", "steps")}


def encoded_state(env: SimulatorEnv) -> np.ndarray | None:
    """What an env gives as its state, as bytes uint8; None where it gives none."""
    state = env.get_state()
    return None if state is None else np.frombuffer(encode_tree(state), np.uint8)
