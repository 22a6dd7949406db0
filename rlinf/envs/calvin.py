"""CALVIN: chains of five instructions for a Franka arm at a table, in PyBullet.

There is no package: the environment is given a recursive checkout of the repository, whose code is
imported as it is, with stand-ins for what it imports for other purposes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Iterator  # noqa: UP035 - evaluated under 3.8 as well

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    Observation,
    SimulatorEnv,
    camera_shapes,
    observation_space,
    quiet,
    require_known,
    require_package,
    require_within,
)
from rlinf.envs.observation_names import depth_of
from rlinf.envs.requirements import Requirements, source_folder
from rlinf.errors import ConfigError

SCENES = ("calvin_scene_A", "calvin_scene_B", "calvin_scene_C", "calvin_scene_D")
CHAINS = 1000
SUBTASK_STEPS = 360
_CAMERAS = {"main_images": ("static", 200), "wrist_images": ("gripper", 84)}


@dataclass(frozen=True)
class CalvinOptions:
    """Options of the ``calvin`` env type."""

    only_with: ClassVar = {"depth": "images: true"}

    scene: str = "calvin_scene_D"
    """Table, ``calvin_scene_A`` to ``calvin_scene_D``; published evaluations are on D."""

    images: bool = True
    """Whether observations hold ``main_images`` [200, 200, 3] and ``wrist_images`` [84, 84, 3]."""

    depth: bool = False
    """Whether observations hold ``depth.main`` [200, 200] and ``depth.wrist`` [84, 84], metres."""

    chain: int = 5
    """Instructions in a row, at most 5."""


class CalvinEnv(SimulatorEnv):
    """A chain of instructions: the next one is given when the present one is carried out.

    Of the benchmark's 1000 chains an episode plays number ``seed % 1000``. Every instruction that
    is carried out earns 1, so that the return is the length reached. The episode ends after the
    last one, which is success, or when one took 360 steps, which is failure. ``states`` [15] are
    CALVIN's ``robot_obs``; actions [7] are relative Cartesian ones in [-1, 1], of whose last
    dimension the sign counts: positive opens the gripper.
    """

    control_rate = 30.0  # of its published demonstrations
    Options = CalvinOptions
    example: ClassVar[dict[str, Any]] = {"images": False}
    requirements = Requirements(
        packages=(
            "pybullet==3.2.7",
            "gym==0.26.2",
            "numpy==1.26.4",
            "hydra-core==1.3.8",
            "hydra-colorlog==1.2.0",
            "omegaconf==2.3.1",
            "opencv-python-headless==4.11.0.86",
            "scipy==1.17.1",
            "numpy-quaternion==2024.0.13",
            "gitpython==3.2.1",
            "cloudpickle==3.1.3",
            "setuptools==75.8.0",
            "gymnasium==1.4.0",
        ),
        module="pybullet",
        download_mb=190,
        disk_mb=630,
        licence="MIT; robot description Apache-2.0",
        source="a checkout of github.com/mees/calvin with its submodule calvin_env",
        source_folders=("calvin_env", "calvin_models"),
    )
    skips_observations = True
    never_black = ("main_images",)
    # A repeated episode was seen to be off by 9e-4 after 20 steps.
    deterministic = False
    replayable = False

    def __init__(self, options: CalvinOptions) -> None:
        super().__init__(options)
        source = source_folder()
        with quiet():
            self._env, self._oracle = _build(source, options)
        self._all_cameras = self._env.cameras
        texts = _annotations(source)
        self._subtasks = tuple(texts)
        self.task_descriptions = tuple(texts.values())
        self.chain_length = options.chain
        self._chains = _chains(source)
        self._chain: list[str] = []
        self._done = self._steps = 0
        self._seen: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {"states": (15,)}
        if options.images:
            sizes = {key: (size, size) for key, (_, size) in _CAMERAS.items()}
            shapes.update(camera_shapes(sizes, depth=options.depth))
        self.observation_space = observation_space(shapes)
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    @classmethod
    def check(cls, options: CalvinOptions, max_episode_steps: int) -> None:
        """Refuse unknown scenes, and an environment without CALVIN's source."""
        require_package("calvin", cls.requirements)
        require_known("scene", options.scene, SCENES)
        require_within("chain", options.chain, 1, 5)
        source = source_folder()
        for part in ("calvin_env/calvin_env/envs/play_table_env.py", "calvin_models/conf"):
            if not (source / part).exists():
                raise ConfigError(
                    f"{source} holds no {part}; `rlinf env install calvin --source DIR` with DIR "
                    f"{cls.requirements.source}",
                    key="type",
                )

    def task_of(self, seed: int) -> int:
        """The first subtask of the chain."""
        return self._subtasks.index(self._chains[seed % CHAINS][2][0])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start a chain."""
        robot, scene, chain = self._chains[(seed or 0) % CHAINS]
        self._chain = chain[: self.options.chain]
        self._done = 0
        self._env.cameras = []
        # CALVIN's reset leaves what the gripper was told last.
        self._env.robot.gripper_action = int(robot[-1])
        with quiet():
            self._seen = self._env.reset(robot_obs=np.array(robot), scene_obs=np.array(scene))
        self._begin_subtask()
        return self.observe(), {"chain": " -> ".join(self._chain)}

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Execute one action [7] without drawing a picture."""
        self._env.cameras = []
        given = np.asarray(action, np.float64).copy()
        given[-1] = 1.0 if given[-1] > 0 else -1.0
        self._seen, _, _, now = self._env.step(given)
        self._steps += 1
        if self._done == len(self._chain):  # it goes on where terminations are ignored
            return 0.0, True, False, {"success": True}
        subtask = self._chain[self._done]
        if self._oracle.get_task_info_for_set(self._start, now, {subtask}):
            self._done += 1
            if self._done == len(self._chain):
                return 1.0, True, False, {"success": True}
            self._begin_subtask()
            return 1.0, False, False, {"success": False}
        failed = self._steps >= SUBTASK_STEPS
        return 0.0, failed, False, {"success": False, "fail": failed}

    def observe(self) -> Observation:
        """Return the robot's state and pictures."""
        observation = {"states": np.asarray(self._seen["robot_obs"], np.float32)}
        if self.options.images:
            self._env.cameras = self._all_cameras
            seen = self._env.get_obs()
            for key, (camera, _) in _CAMERAS.items():
                picture = seen["rgb_obs"][f"rgb_{camera}"]
                observation[key] = np.ascontiguousarray(picture, np.uint8)
                if self.options.depth:
                    depth = seen["depth_obs"][f"depth_{camera}"]
                    observation[depth_of(key)] = np.ascontiguousarray(depth, np.float32)
        return observation

    def render(self) -> Any:
        """Return a picture of the static camera, uint8 [200, 200, 3]."""
        return self._all_cameras[0].render()[0]

    def close(self) -> None:
        """Disconnect from the physics."""
        with quiet():
            self._env.close()
        # Its destructor would close again, by when another env may have been given the same number.
        self._env.ownsPhysicsClient = False

    def _begin_subtask(self) -> None:
        self._start = self._env.get_info()
        self._steps = 0
        self.task_id = self._subtasks.index(self._chain[self._done])


def _build(source: Path, options: CalvinOptions) -> tuple[Any, Any]:
    """The simulation of a scene and what judges its subtasks."""
    # The code is older than numpy 1.24, asks git for its commit, and imports a tactile sensor.
    for alias, kind in (("float", float), ("int", int), ("bool", bool)):
        if alias not in np.__dict__:
            setattr(np, alias, kind)
    sys.modules.setdefault("tacto", types.ModuleType("tacto"))
    root = str(source / "calvin_env")
    if root not in sys.path:
        sys.path.insert(0, root)
    hydra: Any = importlib.import_module("hydra")
    table: Any = importlib.import_module("calvin_env.envs.play_table_env")
    table.get_git_commit_hash = lambda path: "unknown"
    _show_bases()
    with hydra.initialize_config_dir(config_dir=f"{root}/conf", version_base="1.1"):
        config = hydra.compose(
            "config_data_collection",
            overrides=[
                "cameras=static_and_gripper",
                "use_vr=false",
                f"scene={options.scene}",
                f"data_path={root}/data",
            ],
        )
    config.env.use_egl = False
    env = hydra.utils.instantiate(config.env, show_gui=False, use_vr=False, use_scene_info=True)
    tasks: Any = importlib.import_module("calvin_env.envs.tasks")
    omegaconf: Any = importlib.import_module("omegaconf")
    section = omegaconf.OmegaConf.load(f"{root}/conf/tasks/new_playtable_tasks.yaml")
    return env, tasks.Tasks(section.tasks)


@functools.cache
def _show_bases() -> None:
    """Let every simulation of a process have the base of its robot: CALVIN puts those of all into
    the first one."""
    robot: Any = importlib.import_module("calvin_env.robot.robot")
    bullet, add_base = robot.p, robot.Robot.add_base_cylinder

    def add_own_base(one: Any) -> None:
        robot.p = _OfClient(bullet, one.cid)
        try:
            add_base(one)
        finally:
            robot.p = bullet

    robot.Robot.add_base_cylinder = add_own_base


class _OfClient:
    """PyBullet's functions, of one simulation where none is named."""

    def __init__(self, bullet: Any, client: int) -> None:
        self._bullet, self._client = bullet, client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bullet, name)
        return functools.partial(found, physicsClientId=self._client) if callable(found) else found


def _annotations(source: Path) -> dict[str, str]:
    """The instruction of each subtask that evaluations give."""
    omegaconf: Any = importlib.import_module("omegaconf")
    file = source / "calvin_models/conf/annotations/new_playtable_validation.yaml"
    return {str(name): str(texts[0]) for name, texts in omegaconf.OmegaConf.load(file).items()}


def _chains(source: Path) -> list[tuple[list[float], list[float], list[str]]]:
    """The benchmark's chains: robot and scene at their begin, and their subtasks.

    CALVIN draws them anew for every evaluation, which takes minutes, always the same; here they are
    drawn once per source and kept beside the virtual environment.
    """
    kept = Path(sys.prefix) / f"calvin_chains_{CHAINS}.json"
    if not kept.exists():
        folder = source / "calvin_models" / "calvin_agent" / "evaluation"
        with _stand_ins():
            helper = _module("calvin_agent.evaluation.utils", folder / "utils.py")
            sequences = _module("calvin_sequences", folder / "multistep_sequences.py")
        sequences.ProcessPoolExecutor = _InThisProcess
        drawn = sequences.get_sequences(CHAINS, num_workers=1)
        found = []
        for state, chain in drawn:
            robot, scene = helper.get_env_state_for_initial_condition(state)
            found.append((robot.tolist(), scene.tolist(), list(map(str, chain))))
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, kept)
    chains: list[tuple[list[float], list[float], list[str]]] = json.loads(kept.read_text())
    return chains


def _module(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is no module of CALVIN", key="type")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _InThisProcess:
    """What draws the chains, without the processes of its own that CALVIN starts for it."""

    def __init__(self, **options: Any) -> None:
        self.map = map

    def __enter__(self) -> _InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def fnv1(text: str) -> int:
    """32-bit FNV-1 of a text, by which CALVIN seeds the blocks of an initial state."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value * 0x01000193) % 2**32 ^ byte
    return value


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """What CALVIN's evaluation imports beside what is needed of it: learning and drawing."""
    wanted: dict[str, dict[str, Any]] = {
        "calvin_agent": {},
        "calvin_agent.evaluation": {},
        "calvin_agent.models": {},
        "calvin_agent.models.mcil": {"MCIL": None},
        "calvin_agent.utils": {},
        "calvin_agent.utils.utils": {"add_text": None, "format_sftp_path": None},
        "pyhash": {"fnv1_32": lambda: fnv1},
        "torch": {},
    }
    before = {name: sys.modules.get(name) for name in wanted}
    for name, members in wanted.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
