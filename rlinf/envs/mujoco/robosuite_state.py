"""All that an episode of robosuite goes on from, which LIBERO is built on: beside the simulation
what its controllers, buffers and observables hold, and the colours that its tasks change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Dict, Tuple  # noqa: UP035 - the env side runs under 3.8 as well

import numpy as np

from rlinf.envs.mujoco.state import continue_simulation, simulation_state

_PARTS = (
    "robosuite.environments.", "robosuite.robots.", "robosuite.controllers.",
    "robosuite.models.grippers.", "robosuite.utils.buffers", "robosuite.utils.observables",
    "libero.libero.envs.problems.",
)  # fmt: skip
"""Modules of the classes whose attributes change within an episode; other models, and samplers,
are as the reset left them."""
_COLOURS = ("geom_rgba", "site_rgba")  # of what is wiped, or glows


def robosuite_state(env: Any) -> Dict[str, Any]:  # noqa: UP006
    """The simulation of a robosuite environment and what is kept beside it, as plain values."""
    model, data = env.sim.model._model, env.sim.data._data
    return {
        "simulation": simulation_state(model, data),
        "colours": {name: getattr(model, name).copy() for name in _COLOURS},
        "attributes": _attributes(env),
        "wiped": {marker.name: True for marker in getattr(env, "wiped_markers", ())},
    }


def continue_robosuite(env: Any, state: Mapping[str, Any]) -> None:
    """Go on from what :func:`robosuite_state` returned, after a reset into the same episode.

    Raises:
        ValueError: The state is of an environment with other parts.
    """
    model, data = env.sim.model._model, env.sim.data._data
    continue_simulation(model, data, state["simulation"])
    for name, colours in state["colours"].items():
        getattr(model, name)[...] = colours
    _set_attributes(env, state["attributes"])
    if hasattr(env, "wiped_markers"):
        markers = {marker.name: marker for marker in env.model.mujoco_arena.markers}
        env.wiped_markers = [markers[name] for name in state["wiped"]]


def _attributes(env: Any) -> Dict[str, Any]:  # noqa: UP006
    """By the path of each part its attributes. An array that has several names, of which one is
    written into, is told once."""
    found: dict[str, Any] = {}
    told: dict[int, list[str]] = {}
    for path, part in _parts(env):
        values = found[path] = {}
        for name, value in part.items():
            if not isinstance(name, str):  # of a table by numbers, which no step changes
                continue
            if isinstance(value, np.ndarray):
                if value.dtype.hasobject or _is_of_simulation(value):
                    continue
                first = told.setdefault(id(value), [path, name])
                values[name] = value.copy() if first == [path, name] else {"as": first}
            elif isinstance(value, np.generic):
                values[name] = {"scalar": np.array(value)}
            elif value is None or isinstance(value, (bool, int, float, str)):
                values[name] = value
    return found


def _set_attributes(env: Any, state: Mapping[str, Any]) -> None:
    parts = dict(_parts(env))
    if parts.keys() != state.keys():
        other = sorted(parts.keys() ^ state.keys())[0]
        raise ValueError(f"the state is of an environment with other parts: {other}")
    for path, values in state.items():
        for name, value in values.items():
            if not isinstance(value, Mapping):
                parts[path][name] = value
            elif "scalar" in value:
                parts[path][name] = value["scalar"][()]
            else:
                first, known = value["as"]
                parts[path][name] = parts[first][known]


def _parts(env: Any) -> Iterator[Tuple[str, Dict[Any, Any]]]:  # noqa: UP006
    """The attributes of the environment, and of what it is made of, by path; a part that is reached
    by several paths has the first."""
    seen: set[int] = set()

    def within(path: str, value: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
        module = type(value).__module__
        if id(value) in seen:
            return
        if isinstance(value, dict):
            own = value
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                yield from within(f"{path}.{number}", each)
            return
        elif module.startswith(_PARTS):
            own = vars(value)
        else:
            return
        seen.add(id(value))
        yield path, own
        for name, each in list(own.items()):
            yield from within(f"{path}.{name}", each)

    yield from within("env", env)


def _is_of_simulation(array: np.ndarray) -> bool:
    """Whether it shows the arrays of the simulation, which have their values already."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base is not None
