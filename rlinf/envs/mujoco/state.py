"""All of a MuJoCo simulation that its next steps depend on, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Dict, Tuple  # noqa: UP035 - the env side runs under 3.8 as well

import numpy as np

State = Dict[str, np.ndarray]  # noqa: UP006
_DRAWN = "bvh_active"
"""Which bounding volumes were looked at: for pictures of these alone, and most of the bytes."""


def simulation_state(model: Any, data: Any) -> State:
    """The physics with the warm start of the solver, and by name the arrays computed from them.

    These are not those of the physics: a step computes them and then moves on, and tasks read the
    position of a body, or a force on it, as the last step left it.
    """
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    physics = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, physics, kind)
    return {"physics": physics, **{name: array.copy() for name, array in _arrays(model, data)}}


def continue_simulation(model: Any, data: Any, state: State) -> None:
    """Go on from what :func:`simulation_state` returned of a simulation of the same model."""
    import mujoco

    mujoco.mj_setState(model, data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(model, data)  # contacts and constraints, whose number varies
    for name, array in _arrays(model, data):
        array[...] = state[name]


def _arrays(model: Any, data: Any) -> Iterator[Tuple[str, np.ndarray]]:  # noqa: UP006
    """The arrays of fixed size by name; those of contacts and constraints are empty at first."""
    import mujoco

    fresh = mujoco.MjData(model)
    for name in dir(fresh):
        first = getattr(fresh, name)
        if isinstance(first, np.ndarray) and first.size and name != _DRAWN:
            yield name, getattr(data, name)
