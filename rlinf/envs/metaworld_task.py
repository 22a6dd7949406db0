"""A MetaWorld task made light: one model per process, quick resets, exact state.

MetaWorld loads a model of 21 MB for every env, simulates the arm's way to its start twice per
reset, and spends most of a step in Python. Here the envs of a process share the model (the only
fields that tasks change, body and site positions, are put in place before an env is used), the way
to the start is simulated once per placement, and the observation is assembled without name
look-ups. Observations, rewards and infos stay those of MetaWorld to the last bit, which the tests
check.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from types import FunctionType
from typing import Any

import numpy as np

# No window system is needed to simulate; pictures open their own context (see mujoco_picture.py).
_GL_CHOICE = os.environ.setdefault("MUJOCO_GL", "disable")

import mujoco  # noqa: E402
from gymnasium.utils import seeding  # noqa: E402
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402

from rlinf.envs.mujoco_picture import Painter  # noqa: E402

_FRAME = 18
_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_REMEMBERED_STARTS = 4
_SIMPLE = (bool, int, float, str, type(None), np.bool_, np.number)


class _SharedModel:
    """A compiled model and what its envs have in common."""

    def __init__(self, path: str) -> None:
        self.model = mujoco.MjModel.from_xml_path(path)
        self.body_pos, self.site_pos = self.model.body_pos, self.model.site_pos
        self.pristine = (self.body_pos.copy(), self.site_pos.copy())
        self.owner: Any = None
        self.starts: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self.painter = Painter(self.model)

    def place(self, owner: Any, body_pos: np.ndarray, site_pos: np.ndarray) -> None:
        """Put the positions of ``owner`` into the model."""
        self.body_pos[:], self.site_pos[:] = body_pos, site_pos
        self.owner = owner


_MODELS: dict[str, _SharedModel] = {}


def _shared_model(path: str) -> _SharedModel:
    if path not in _MODELS:
        _MODELS[path] = _SharedModel(path)
    return _MODELS[path]


class _Light:
    """Overrides of a MetaWorld env class; stands before it in the class order."""

    travels = True

    def _initialize_simulation(self: Any) -> tuple[Any, Any]:
        self.shared = _shared_model(self.fullpath)
        self.shared.place(self, *self.shared.pristine)
        model = self.shared.model
        data = mujoco.MjData(model)
        body = {name: data.body(name).xpos for name in ("hand", "rightclaw", "leftclaw")}
        self.hand_pos, self.right_pos, self.left_pos = body.values()
        return model, data

    def _reset_hand(self: Any, steps: int = 50) -> None:
        """Bring the hand to its start, from memory when this placement was simulated before."""
        if not self.travels:
            mujoco.mj_forward(self.model, self.data)
            self.init_tcp = self.tcp_center
            return
        shared = self.shared
        key = b"".join(
            part.tobytes() for part in (shared.body_pos, self.hand_init_pos, np.array(steps))
        )
        start = shared.starts.get(key)
        if start is None:
            super()._reset_hand(steps - 1)  # type: ignore[misc]
            shared.starts[key] = _physics(self)
            if len(shared.starts) > _REMEMBERED_STARTS:
                shared.starts.popitem(last=False)
        else:
            shared.starts.move_to_end(key)
            mujoco.mj_setState(self.model, self.data, start, _PHYSICS)
        # The last step is always simulated: it computes what MuJoCo derives from the state.
        super()._reset_hand(1)  # type: ignore[misc]

    def _get_curr_obs_combined_no_goal(self: Any) -> np.ndarray:
        """Return hand position, gripper opening and the objects' positions and rotations [18]."""
        observation = np.zeros(_FRAME)
        observation[:3] = self.hand_pos
        apart = self.right_pos - self.left_pos
        observation[3] = min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        positions, rotations = self._get_pos_objects(), self._get_quat_objects()
        for number in range(len(positions) // 3):
            at = 4 + 7 * number
            observation[at : at + 3] = positions[3 * number : 3 * number + 3]
            observation[at + 3 : at + 7] = rotations[4 * number : 4 * number + 4]
        return observation


class QuickRotation:
    """What tasks use of ``scipy.spatial.transform.Rotation``, for one matrix that is a rotation.

    scipy spends a quarter of a step on proving that; a matrix from MuJoCo is one. The arithmetic is
    scipy's: F. Landis Markley, "Unit Quaternion from Rotation Matrix", 2008.

    Args:
        matrix: Rotation matrix [3, 3].
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix: list[list[float]] = matrix.tolist()

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> QuickRotation:
        """Return the rotation of ``matrix``."""
        return cls(matrix)

    def as_quat(self) -> tuple[float, float, float, float]:
        """Return the unit quaternion (x, y, z, w)."""
        m = self._matrix
        trace = m[0][0] + m[1][1] + m[2][2]
        candidates = (m[0][0], m[1][1], m[2][2], trace)
        i = candidates.index(max(candidates))
        if i == 3:
            q = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1 + trace]
        else:
            j, k = (i + 1) % 3, (i + 2) % 3
            q = [0.0, 0.0, 0.0, m[k][j] - m[j][k]]
            q[i] = 1 - trace + 2 * m[i][i]
            q[j], q[k] = m[j][i] + m[i][j], m[k][i] + m[i][k]
        norm = math.sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3])
        return q[0] / norm, q[1] / norm, q[2] / norm, q[3] / norm


def _light_class(base: Any) -> Any:
    """Return the subclass of a MetaWorld env class that is used here; the base stays as it is."""
    method = base._get_quat_objects
    names = {**method.__globals__, "Rotation": QuickRotation}
    quick = FunctionType(method.__code__, names, method.__name__)
    members = {"__module__": base.__module__, "_get_quat_objects": quick}
    return type(base.__name__, (_Light, base), members)


class MetaWorldTask:
    """One env of a task.

    Args:
        name: Task of MT50.
        partially_observable: Whether the goal is hidden.
    """

    def __init__(self, name: str, *, partially_observable: bool) -> None:
        self._env: Any = _light_class(ALL_V3_ENVIRONMENTS[name])()
        self._env._partially_observable = partially_observable
        self._env.__dict__.pop("sawyer_observation_space", None)
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self._shared: _SharedModel = self._env.shared
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
        env._prev_obs = observation[:_FRAME].copy()
        observation[_FRAME : 2 * _FRAME] = env._prev_obs
        self._body_pos, self._site_pos = shared.body_pos.copy(), shared.site_pos.copy()
        return np.asarray(observation, np.float64)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, dict[str, Any]]:
        """Execute one action [4]; returns observation [39], reward, info."""
        self._enter()
        observation, reward, _, _, info = self._env.step(action)
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
            "physics": _physics(env),
            "body_pos": self._body_pos,
            "site_pos": self._site_pos,
            "attributes": attributes,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        env = self._env
        self._body_pos, self._site_pos = state["body_pos"], state["site_pos"]
        self._shared.place(self, self._body_pos, self._site_pos)
        mujoco.mj_setState(env.model, env.data, state["physics"], _PHYSICS)
        mujoco.mj_forward(env.model, env.data)
        # Once more: mj_forward changed the warm start of the constraint solver.
        mujoco.mj_setState(env.model, env.data, state["physics"], _PHYSICS)
        for name, value in state["attributes"].items():
            setattr(env, name, value)

    def close(self) -> None:
        """Release the simulation."""
        self._env.close()

    def _enter(self) -> None:
        if self._shared.owner is not self:
            self._shared.place(self, self._body_pos, self._site_pos)


def _physics(env: Any) -> np.ndarray:
    """Return all that MuJoCo's next step depends on, the solver's warm start included."""
    state = np.empty(mujoco.mj_stateSize(env.model, _PHYSICS))
    mujoco.mj_getState(env.model, env.data, state, _PHYSICS)
    return state


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
