"""A MetaWorld task made light: one model per process, quick resets, exact state.

Observations, rewards, infos and the state of the simulation stay those of MetaWorld to the last
bit, which the tests check.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections import OrderedDict
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np

# No window system is needed to simulate; pictures open their own context (see mujoco/picture.py).
# MuJoCo reads this when it is imported.
_GL_CHOICE = os.environ.setdefault("MUJOCO_GL", "disable")

import mujoco  # noqa: E402
from gymnasium.utils import seeding  # noqa: E402

from rlinf.envs.metaworld.deferred_scipy import deferred_rotations  # noqa: E402

with deferred_rotations():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

from rlinf.envs.metaworld.quick import quick_class  # noqa: E402
from rlinf.envs.mujoco.picture import Painter  # noqa: E402

_SIMPLE = (bool, int, float, str, type(None), np.bool_, np.number)
FRAME = 18
PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_REMEMBERED_STARTS = 4
_UPRIGHT = np.array([1.0, 0.0, 1.0, 0.0])
_SINGLE = np.dtype(np.float32)
_SINGLES = struct.Struct("3f")


class _SharedModel:
    """A compiled model and what its envs have in common."""

    @classmethod
    @cache
    def of(cls, path: str) -> _SharedModel:
        """That of this process for a file."""
        return cls(path)

    def __init__(self, path: str) -> None:
        self.model = mujoco.MjModel.from_xml_path(path)
        self.body_pos, self.site_pos = self.model.body_pos, self.model.site_pos
        self.pristine = (self.body_pos.copy(), self.site_pos.copy())
        self.owner: Any = None
        self.starts: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._painters: dict[bool, Painter] = {}

    def painter(self, *, effects: bool) -> Painter:
        """Who draws the model, with shadows, reflections and sky or without."""
        if effects not in self._painters:
            self._painters[effects] = Painter(self.model, effects=effects)
        return self._painters[effects]

    def forget_painters(self) -> None:
        """Draw the next picture in a new graphics context."""
        lost, self._painters = self._painters, {}
        for painter in lost.values():
            with suppress(Exception):  # of a context that is lost
                painter.close()

    def place(self, owner: Any, body_pos: np.ndarray, site_pos: np.ndarray) -> None:
        """Put the positions of ``owner`` into the model."""
        self.body_pos[:], self.site_pos[:] = body_pos, site_pos
        self.owner = owner


class _Views:
    """The parts of a simulation by name, each looked up once."""

    def __init__(self, data: Any) -> None:
        self.body = _Known(partial(mujoco.MjData.body, data))
        self.geom = _Known(partial(mujoco.MjData.geom, data))
        self.site = _Known(partial(mujoco.MjData.site, data))


class _Known(dict[str, Any]):
    def __init__(self, find: Any) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, name: str) -> Any:
        self[name] = found = self._find(name)
        return found


class NamedData(mujoco.MjData):  # type: ignore[misc]
    """Simulation data that finds a body, geom or site by name without searching again.

    The views belong to the env: they keep the simulation alive, so it must not keep them.
    """

    views: weakref.ref[_Views]

    def body(self, name: str) -> Any:
        """The view of a body."""
        return self.views().body[name]  # type: ignore[union-attr]

    def geom(self, name: str) -> Any:
        """The view of a geom."""
        return self.views().geom[name]  # type: ignore[union-attr]

    def site(self, name: str) -> Any:
        """The view of a site."""
        return self.views().site[name]  # type: ignore[union-attr]


class _Light:
    """Overrides of a MetaWorld env class; stands before it in the class order."""

    travels = True

    def _initialize_simulation(self: Any) -> tuple[Any, Any]:
        self.shared = _SharedModel.of(self.fullpath)
        self.shared.place(self, *self.shared.pristine)
        model = self.shared.model
        data = NamedData(model)
        self.views = _Views(data)
        data.views = weakref.ref(self.views)
        self.hand_pos, self.right_pos, self.left_pos = (
            data.body(name).xpos for name in ("hand", "rightclaw", "leftclaw")
        )
        self.right_tip, self.left_tip = (
            data.site(name).xpos for name in ("rightEndEffector", "leftEndEffector")
        )
        self.ctrl, self.mocap_quat = data.ctrl, data.mocap_quat[0]
        self.mocap_pos = data.mocap_pos[0]
        return model, data

    def prepare_steps(self: Any) -> None:
        """Note what stays the same over all episodes; to be called once the env is built."""
        space = self.sawyer_observation_space
        self.lowest, self.highest = space.low, space.high
        self.mocap_bounds = (self.mocap_low.tolist(), self.mocap_high.tolist())
        self.single_scale = float(np.float32(self.action_scale))

    def quick_step(self: Any, action: np.ndarray) -> tuple[np.ndarray, Any, dict[str, Any]]:
        """Execute one action [4] as ``step`` does; returns observation [39], reward, info.

        Left out is what has no effect: positions of sites, which ``mj_forward`` computes anew, and
        forces on bodies, which no task reads.
        """
        model, data = self.model, self.data
        if self.curr_path_length >= self.max_path_length:
            raise ValueError(f"the episode ended after {self.max_path_length} steps; reset it")
        self.set_xyz_action(action[:3])
        ctrl, effort = self.ctrl, action[3]
        ctrl[0], ctrl[1] = effort, -effort
        mujoco.mj_step(model, data, nstep=self.frame_skip)
        self.curr_path_length += 1
        mujoco.mj_forward(model, data)
        observation = self._get_obs()
        np.maximum(observation, self.lowest, out=observation)
        np.minimum(observation, self.highest, out=observation)
        self._last_stable_obs = observation
        reward, info = self.evaluate_state(observation, action)
        return observation, reward, info

    def set_xyz_action(self: Any, action: np.ndarray) -> None:
        """Move the target of the hand by ``action`` [3] within its bounds."""
        if action.dtype != _SINGLE:
            super().set_xyz_action(action)  # type: ignore[misc]
            return
        scale, position = self.single_scale, self.mocap_pos
        x, y, z = action.tolist()
        # The product of two singles is exact as a double; packing rounds it to a single.
        moves = _SINGLES.unpack(
            _SINGLES.pack(
                (-1.0 if x < -1.0 else 1.0 if x > 1.0 else x) * scale,
                (-1.0 if y < -1.0 else 1.0 if y > 1.0 else y) * scale,
                (-1.0 if z < -1.0 else 1.0 if z > 1.0 else z) * scale,
            )
        )
        now, (lowest, highest) = position.tolist(), self.mocap_bounds
        for axis in (0, 1, 2):
            at, low, high = now[axis] + moves[axis], lowest[axis], highest[axis]
            position[axis] = low if at < low else high if at > high else at
        self.mocap_quat[:] = _UPRIGHT

    @property
    def tcp_center(self: Any) -> Any:
        """The middle between the two fingers [3]."""
        return (self.right_tip + self.left_tip) / 2.0

    def get_body_com(self: Any, body_name: str) -> Any:
        """The position of a body [3]."""
        return self.views.body[body_name].xpos

    def _get_site_pos(self: Any, site_name: str) -> Any:
        """A copy of the position of a site [3]."""
        return self.views.site[site_name].xpos.copy()

    def touching_object(self: Any, object_geom_id: int) -> bool:
        """Whether both fingers press on a geom."""
        contact, force = self.data.contact, self.data.efc_force
        pads = [self.views.geom[name].id for name in ("leftpad_geom", "rightpad_geom")]
        forces: list[Any] = [0, 0]
        pairs = contact.geom.tolist()
        for number, pair in enumerate(pairs):
            if object_geom_id in pair:
                for side in (0, 1):
                    if pads[side] in pair:
                        forces[side] += force[contact.efc_address[number]]
        return bool(forces[0] > 0 and forces[1] > 0)

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
            self._travel(steps - 1)
            shared.starts[key] = physics(self)
            if len(shared.starts) > _REMEMBERED_STARTS:
                shared.starts.popitem(last=False)
        else:
            shared.starts.move_to_end(key)
            mujoco.mj_setState(self.model, self.data, start, PHYSICS)
        # The last step is always simulated: it computes what MuJoCo derives from the state.
        super()._reset_hand(1)  # type: ignore[misc]

    def _travel(self: Any, steps: int) -> None:
        """Do ``steps`` steps of the way to the start; they are all alike, so in one call."""
        self.mocap_pos[:], self.mocap_quat[:] = self.hand_init_pos, _UPRIGHT
        self.ctrl[0], self.ctrl[1] = -1.0, 1.0
        mujoco.mj_step(self.model, self.data, nstep=steps * self.frame_skip)

    def _get_obs(self: Any) -> np.ndarray:
        """The present frame, the one before and the goal [39]."""
        goal = self._get_pos_goal()
        if self._partially_observable:
            goal = np.zeros_like(goal)
        frame = self._get_curr_obs_combined_no_goal()
        observation = np.concatenate((frame, self._prev_obs, goal))
        self._prev_obs = frame
        return observation

    def _get_curr_obs_combined_no_goal(self: Any) -> np.ndarray:
        """Hand position, gripper opening and the objects' positions and rotations [18]."""
        observation = np.zeros(FRAME)
        observation[:3] = self.hand_pos
        apart = self.right_pos - self.left_pos
        observation[3] = min(max(math.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        positions, rotations = self._get_pos_objects(), self._get_quat_objects()
        for number in range(len(positions) // 3):
            at = 4 + 7 * number
            observation[at : at + 3] = positions[3 * number : 3 * number + 3]
            observation[at + 3 : at + 7] = rotations[4 * number : 4 * number + 4]
        return observation


def _light_class(base: Any) -> Any:
    """The subclass of a MetaWorld env class that is used here; the base stays as it is."""
    return type(base.__name__, (_Light, quick_class(base)), {"__module__": base.__module__})


def physics(env: Any) -> np.ndarray:
    """All that MuJoCo's next step depends on, the solver's warm start included."""
    state = np.empty(mujoco.mj_stateSize(env.model, PHYSICS))
    mujoco.mj_getState(env.model, env.data, state, PHYSICS)
    return state


class MetaWorldTask:
    """One env of a task of MT50.

    MetaWorld loads a model of 21 MB for every env, simulates the arm's way to its start twice per
    reset, and spends most of a step in Python. Here the envs of a process share the model (the only
    fields that tasks change, body and site positions, are put in place before an env is used), the
    way to the start is simulated once per placement, and a step looks no name up twice and calls
    versions of NumPy's and the rewards' functions that are quick for one vector or number.
    """

    def __init__(self, name: str, *, partially_observable: bool) -> None:
        self._env: Any = _light_class(ALL_V3_ENVIRONMENTS[name])()
        self._env._partially_observable = partially_observable
        self._env.__dict__.pop("sawyer_observation_space", None)
        self._env._set_task_called = True
        self._env.seeded_rand_vec = True
        self._env.prepare_steps()
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
        env._prev_obs = observation[:FRAME].copy()
        observation[FRAME : 2 * FRAME] = env._prev_obs
        self._body_pos, self._site_pos = shared.body_pos.copy(), shared.site_pos.copy()
        return np.asarray(observation, np.float64)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, dict[str, Any]]:
        """Execute one action [4]; returns observation [39], reward, info."""
        self._enter()
        observation, reward, info = self._env.quick_step(action)
        return observation, float(reward), info

    def picture(self, camera: str, size: int, *, effects: bool = False) -> np.ndarray:
        """A picture of the present state, uint8 [size, size, 3]."""
        self._enter()
        return self._shared.painter(effects=effects).paint(self._env.data, camera, size)

    def observations(
        self, camera: str, size: int, *, effects: bool = False, depth: bool = False
    ) -> dict[str, np.ndarray]:
        """The same as ``main_images``, and ``depth.main`` where it is shown."""
        self._enter()
        painter = self._shared.painter(effects=effects)
        return painter.observations(self._env.data, {"main_images": camera}, size, depth=depth)

    def get_state(self) -> dict[str, Any]:
        """Physics, placements and plain attributes."""
        return {
            "physics": physics(self._env),
            "body_pos": self._body_pos,
            "site_pos": self._site_pos,
            "attributes": {k: value for k, value in vars(self._env).items() if _is_plain(value)},
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

    def discard(self) -> None:
        """Release it, and what draws it, too."""
        self._shared.forget_painters()
        self.close()

    def _enter(self) -> None:
        if self._shared.owner is not self:
            self._shared.place(self, self._body_pos, self._site_pos)


def _is_plain(value: Any) -> bool:
    """Whether an attribute is a value of its own, not a view of simulator memory.

    Views follow the simulator by themselves; a copy in their place would stand still.
    """
    if isinstance(value, np.ndarray):
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        return root.base is None
    return isinstance(value, _SIMPLE)
