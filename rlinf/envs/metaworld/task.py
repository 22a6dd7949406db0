"""A MetaWorld task made light: one model per process, quick resets, exact state.

MetaWorld loads a model of 21 MB for every env, simulates the arm's way to its start twice per
reset, and spends most of a step in Python. Here the envs of a process share the model (the only
fields that tasks change, body and site positions, are put in place before an env is used), the way
to the start is simulated once per placement, and a step looks no name up twice and calls versions
of NumPy's and the rewards' functions that are quick for one vector or number (see
``metaworld_light.py`` and ``metaworld_quick.py``). Observations, rewards, infos and the state of
the simulation stay those of MetaWorld to the last bit, which the tests check.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# First of all: it says that no window system is needed, which MuJoCo reads when it is imported.
from rlinf.envs.metaworld.light import FRAME, PHYSICS, SharedModel, light_class, physics

# isort: split
import mujoco
from gymnasium.utils import seeding
from metaworld.env_dict import ALL_V3_ENVIRONMENTS

_SIMPLE = (bool, int, float, str, type(None), np.bool_, np.number)


class MetaWorldTask:
    """One env of a task.

    Args:
        name: Task of MT50.
        partially_observable: Whether the goal is hidden.
    """

    def __init__(self, name: str, *, partially_observable: bool) -> None:
        self._env: Any = light_class(ALL_V3_ENVIRONMENTS[name])()
        self._env._partially_observable = partially_observable
        self._env.__dict__.pop("sawyer_observation_space", None)
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self._env.prepare_steps()
        self._shared: SharedModel = self._env.shared
        self._body_pos, self._site_pos = self._shared.pristine

    def reset(self, seed: int) -> np.ndarray:
        """Start the episode of ``seed`` and return the observation [39].

        First the positions are drawn, as MetaWorld draws its tasks; then the env is reset with
        these positions, as MetaWorld does after ``set_task``.
        """
        env, shared = self._env, self._shared
        shared.place(self, *shared.pristine)
        env._np_random, _ = seeding.np_random(seed)
        for drawing in (True, False):
            mujoco.mj_resetData(env.model, env.data)
            env._freeze_rand_vec = not drawing
            env.travels = not drawing
            env.curr_path_length = 0
            observation = env.reset_model()
        env._did_see_sim_exception = False
        env._prev_obs = observation[:FRAME].copy()
        observation[FRAME : 2 * FRAME] = env._prev_obs
        self._body_pos, self._site_pos = shared.body_pos.copy(), shared.site_pos.copy()
        return np.asarray(observation, np.float64)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, dict[str, Any]]:
        """Execute one action [4]; returns observation [39], reward, info."""
        self._enter()
        observation, reward, info = self._env.quick_step(action)
        return observation, float(reward), info

    def picture(self, camera: str, size: int) -> np.ndarray:
        """Return a picture of the present state, uint8 [size, size, 3]."""
        self._enter()
        return self._shared.painter.paint(self._env.data, camera, size)

    def get_state(self) -> dict[str, Any]:
        """Return physics, placements and plain attributes."""
        env = self._env
        attributes = {name: value for name, value in vars(env).items() if _is_plain(value)}
        return {
            "physics": physics(env),
            "body_pos": self._body_pos,
            "site_pos": self._site_pos,
            "attributes": attributes,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        env = self._env
        self._body_pos, self._site_pos = state["body_pos"], state["site_pos"]
        self._shared.place(self, self._body_pos, self._site_pos)
        mujoco.mj_setState(env.model, env.data, state["physics"], PHYSICS)
        mujoco.mj_forward(env.model, env.data)
        # Once more: mj_forward changed the warm start of the constraint solver.
        mujoco.mj_setState(env.model, env.data, state["physics"], PHYSICS)
        for name, value in state["attributes"].items():
            setattr(env, name, value)

    def close(self) -> None:
        """Release the simulation."""
        self._env.close()

    def _enter(self) -> None:
        if self._shared.owner is not self:
            self._shared.place(self, self._body_pos, self._site_pos)


def _is_plain(value: Any) -> bool:
    """Return whether an attribute is a value of its own, not a view of simulator memory.

    Views follow the simulator by themselves; a copy in their place would stand still.
    """
    if isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        return root.base is None
    return isinstance(value, _SIMPLE)
