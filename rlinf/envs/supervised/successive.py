"""Observations of the steps before, shown beside the present one; on the env side."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import INSTRUCTION_KEY, Observation, SimulatorEnv
from rlinf.envs.observation_names import age, earlier


def successive(adapter: type[SimulatorEnv], steps: int) -> type[SimulatorEnv]:
    """Return the adapter that shows each observation of the last ``steps`` steps.

    At the start of an episode the first observation stands for those before it. Where an episode
    terminates inside an action chunk, what was not looked at on the way is older than it says.
    """
    if steps == 1:
        return adapter
    return type(adapter.__name__, (_Successive, adapter), {"observation_steps": steps})


class _Successive(SimulatorEnv):
    """Laid over an adapter, before it in the order of its bases."""

    def __init__(self, options: Any) -> None:
        # First: an adapter may begin an episode to see what it shows.
        self._before: deque[Observation] = deque(maxlen=self.observation_steps - 1)
        super().__init__(options)
        shown: Any = self.observation_space
        self.observation_space = spaces.Dict(
            {
                earlier(key, steps): space
                for steps in range(self.observation_steps)
                for key, space in shown.spaces.items()
                if not (steps and key == INSTRUCTION_KEY)
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """See the adapter."""
        # A simulator may look at itself while it resets, before there is anything to remember.
        self._before.clear()
        observation, info = super().reset(seed=seed, options=options)
        return self._remembered(observation), info

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See the adapter."""
        observation, *others = super().step(action)
        return (self._remembered(observation), *others)  # type: ignore[return-value]

    def observe(self) -> Observation:
        """See the adapter."""
        return self._with_earlier(super().observe())

    def get_state(self) -> dict[str, Any] | None:
        """See the adapter."""
        state = super().get_state()
        if state is None:
            return None
        return {"simulator": state, "before": {str(n): seen for n, seen in enumerate(self._before)}}

    def set_state(self, state: dict[str, Any]) -> None:
        """See the adapter."""
        super().set_state(state["simulator"])
        self._before.clear()
        self._before.extend(state["before"].values())

    def _remembered(self, observation: Observation) -> Observation:
        now = {key: value for key, value in observation.items() if not age(key)}
        found = self._with_earlier(now)
        # An adapter may write its next observation into the same arrays.
        self._before.append({key: np.array(value) for key, value in now.items()})
        return found

    def _with_earlier(self, observation: Observation) -> Observation:
        found = dict(observation)
        for steps in range(1, self.observation_steps):
            # The newest is the last one.
            known = self._before[max(len(self._before) - steps, 0)] if self._before else observation
            found.update(
                {earlier(key, steps): known[key] for key in observation if key != INSTRUCTION_KEY}
            )
        return found
