"""What a simulator adapter is, and which there are.

Files on the env side (this one, ``host.py``, ``process.py``, the adapters) run in env processes,
perhaps under another interpreter. They import the standard library, numpy, gymnasium and, lazily,
their simulator; nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Dict, Tuple  # noqa: UP035 - the env side runs under 3.8 as well

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf.config.nearest import did_you_mean
from rlinf.config.registry import Registry
from rlinf.envs.observation_names import depth_of, is_depth, present
from rlinf.envs.requirements import Requirements
from rlinf.errors import ConfigError, told

Observation = Dict[str, np.ndarray]  # noqa: UP006
"""One observation: ``states``, ``proprioception`` float32 [D]; ``main_images``, ``wrist_images``
uint8 [H, W, 3] or [n, H, W, 3]; ``extra_view_images`` uint8 [n, H, W, 3]; further cameras by name,
``images.NAME`` uint8 [H, W, 3]; and ``depth.NAME`` float32 [H, W], of each pixel of a picture
(:func:`~rlinf.envs.observation_names.depth_of`) how far off what it shows is along the axis of the
camera, in metres. Any subset, the same at every step."""

PICTURE_SIZES = (32, 1024)
"""The smallest and the largest height and width of a picture, in pixels."""
INSTRUCTION_KEY = "instruction"
"""The entry of an observation that holds what is to be done in words, where a simulator words it
anew for every episode and no table can hold the texts: uint8 [256], see :func:`instruction_bytes`.
"""
INSTRUCTION_SHAPE = (256,)
VECTORS = ("states", "proprioception")
"""Observations [D]; those of several simulators in one batch are padded with zeros."""
_NO_PICTURES = "this simulator draws no pictures"
_PICTURES = ("main_images", "wrist_images", "extra_view_images")


def observation_type(key: str) -> type[np.generic] | None:
    """Return the type that an observation of this key has; None where there is no such key."""
    key = present(key)
    if key in VECTORS or (is_depth(key) and re.fullmatch(r"\w+\.\w+", key)):
        return np.float32
    if key in (*_PICTURES, INSTRUCTION_KEY) or re.fullmatch(r"images\.\w+", key):
        return np.uint8
    return None


def observation_space(shapes: Mapping[str, Sequence[int]]) -> spaces.Dict:
    """Return the space of observations whose entries have these shapes, by their keys."""
    parts: dict[str, spaces.Space[Any]] = {}
    for key, shape in shapes.items():
        if observation_type(key) is np.uint8:
            parts[key] = spaces.Box(0, 255, tuple(shape), np.uint8)
        else:
            parts[key] = spaces.Box(-np.inf, np.inf, tuple(shape), np.float32)
    return spaces.Dict(parts)


def camera_shapes(
    pictures: Mapping[str, tuple[int, int]], *, depth: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of pictures of these heights and widths by their keys, and of the depth of
    each where it is shown."""
    shapes: dict[str, tuple[int, ...]] = {key: (*size, 3) for key, size in pictures.items()}
    return {**shapes, **({depth_of(key): size for key, size in pictures.items()} if depth else {})}


def instruction_bytes(text: str) -> np.ndarray:
    """Return a text as uint8 [256]: UTF-8, zeros behind it; a longer one is cut."""
    kept = text.encode()[: INSTRUCTION_SHAPE[0]].decode(errors="ignore").encode()
    return np.frombuffer(kept.ljust(INSTRUCTION_SHAPE[0], b"\0"), np.uint8)


def instruction_text(given: np.ndarray) -> str:
    """Return the text of one ``instruction`` [256]."""
    return bytes(given.tolist()).rstrip(b"\0").decode()


class Simulator:
    """What all adapters say of themselves.

    ``observation_space`` is a ``gymnasium.spaces.Dict`` over keys of :data:`Observation`,
    ``action_space`` a ``Box`` [A], ``Discrete`` or ``MultiDiscrete`` [A]. Time limits belong to the
    host: an adapter does not truncate at ``max_episode_steps``.
    """

    Options: ClassVar[type[Any]]
    """Frozen dataclass of the adapter's options."""

    requirements: ClassVar[Requirements | None] = None
    """What the simulator needs to be installed; None where gymnasium alone will do."""

    example: ClassVar[Dict[str, Any]] = {}  # noqa: UP006
    """Options of a light task, with which ``rlinf check env --installed`` checks the adapter."""

    imported: ClassVar[Tuple[str, ...]] = ()  # noqa: UP006
    """Modules that take long to import, which is done once for all env processes of a parent:
    importing them begins no thread and opens no device. Not for what a user edits."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    state_parts: tuple[tuple[str, int], ...] = ()
    """Name and size of each part of ``states``, in their order; empty where nobody says. What was
    learnt of another order is refused."""

    action_start: tuple[float, ...] = ()
    """[A]; what the simulator itself calls the discrete actions of index 0, which it is given as
    indices all the same: sets, and clients of a server, tell them as it does. Empty: 0."""

    task_descriptions: tuple[str, ...] = ()
    """What there is to do, in words, one text per task; known after the constructor."""

    deterministic: bool = True
    """Whether the same seed and actions give the same floats, in every process."""

    replayable: bool = True
    """Whether an env that was lost, or a resumed one, may be rebuilt by repeating its actions since
    the reset; not so for what cannot reproduce them to the bit, or would move a real arm. Where it
    is false and there is no :meth:`get_state` either, the episode is closed instead."""

    control_rate: float | None = None
    """Actions per second of simulated time; None where nobody said. What was recorded at another
    rate is not learnt from."""

    def task_of(self, seed: int) -> int:
        """Return the task that an episode of this seed begins in, an index into the table."""
        return seed % max(1, len(self.task_descriptions))

    chain_length: int = 0
    """Tasks that follow each other within an episode, each of which earns 1 when it is carried out:
    evaluations tell how many episodes reached each length. 0: an episode is of one task."""

    judged_at_end: bool = False
    """Whether the success that a step tells of counts in the last step of an episode alone: of a
    bound on the return, which rewards below zero begin above."""

    remark: str = ""
    """What the user is to know of an episode that is over, in words; told once."""

    never_black: tuple[str, ...] = ()
    """Keys of pictures that always show something: one without a lit pixel is a fault."""

    @classmethod
    def draws_by_mujoco(cls, options: Any) -> bool:
        """Whether these options make it a simulator that MuJoCo draws, where
        :attr:`requirements` does not say so of all of them: it is given ``MUJOCO_GL``."""
        del options
        return False

    @classmethod
    def modules(cls, options: Any) -> tuple[str, ...]:
        """Modules that these options name, in which the task itself may be written."""
        del options
        return ()

    @classmethod
    def check(cls, options: Any, max_episode_steps: int) -> None:
        """Refuse options that cannot work, without importing the simulator.

        Raises:
            ConfigError: An option is not legal; ``key`` is ``options.NAME``, or that of another
                setting of the env section.
            MissingPackageError: The simulator is not installed.
        """

    @classmethod
    def expert(cls, options: Any) -> Callable[[Observation], np.ndarray] | None:
        """Who solves the task with these options from observations alone, None if nobody does.

        The function gives an action [A] for an observation. It runs where the episodes are
        recorded, not in an env process.
        """
        return None


class SimulatorEnv(Simulator, gymnasium.Env[Observation, np.ndarray]):
    """One simulated episode at a time, with ``reset`` and ``step`` of gymnasium.

    ``reset(seed=...)`` must depend on the seed alone. ``info["success"]`` and ``info["fail"]``
    (bool) are read when present. An action is a float32 array [A], which holds whole numbers for
    ``MultiDiscrete``, and an ``int`` for one choice.
    """

    observation_steps: ClassVar[int] = 1
    """Of how many successive steps the observations are shown; not an adapter's to say."""

    task_id: int = 0
    """Which of ``task_descriptions`` holds now; it may change at a reset, and within an episode."""

    skips_observations: ClassVar[bool] = False
    """Whether :meth:`step_blind` and :meth:`observe` exist: inside an action chunk only the last
    observation is used, and an env that renders can leave out the others."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute one action; where observations can be left out, this one is made."""
        reward, terminated, truncated, info = self.step_blind(action)
        return self.observe(), reward, terminated, truncated, info

    def step_blind(self, action: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        """Step without making an observation; returns reward, terminated, truncated, info."""
        raise NotImplementedError

    def observe(self) -> Observation:
        """Return the observation of the present state."""
        raise NotImplementedError

    def render(self) -> Any:
        """Return a picture, uint8 [H, W, 3]."""
        raise RuntimeError(_NO_PICTURES)

    def get_state(self) -> dict[str, Any] | None:
        """Return all that the next steps depend on, or None when the simulator cannot say.

        Values are arrays, numbers, text, booleans, None, or dictionaries of those. Without a state,
        an env is rebuilt by replaying its actions since the last reset. It is called between two
        chunks, also within an episode that goes on, and must change nothing.
        """
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; called after a reset with the seed of the same episode."""
        raise NotImplementedError

    def discard(self) -> None:
        """Close after a fault; nothing of it may be left to other envs of the process."""
        self.close()


@dataclass(frozen=True)
class BatchStep:
    """What followed one action, or one chunk of C, in each of the N rows of a batch."""

    observations: Observation | Callable[[], Observation]
    """By key [N, ...]; of rows that the simulator reset by itself, those after the reset. Or what
    reads them from the device: of a chunk only the last ones are read, and those that an episode
    ends with, before anything else is done with the simulator."""
    rewards: np.ndarray
    """[N] float; [N, C] after a whole chunk."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool; by the simulator itself."""
    success: np.ndarray
    """[N] bool."""
    final_observations: Observation | Callable[[], Observation] | None = None
    """The same of what rows showed before the simulator reset them; None where it tells nothing,
    and the observations after the reset stand for them."""


class SimulatorBatch(Simulator):
    """N episodes that one simulator steps together, on its device.

    A row that ended within an action chunk is given zeros up to the end of the chunk, which count
    for nothing.
    """

    deterministic = False
    replayable = False

    whole_chunks: ClassVar[bool] = False
    """Whether the simulator executes a chunk in one call: :meth:`chunk_step` exists and
    :meth:`step` does not. The call counts as one step to ``step_deadline``."""

    one_batch_per_process: ClassVar[bool] = False
    """Whether a process can hold one batch alone: each pipeline stage is a batch, so that there can
    be no second one."""

    def __init__(self, options: Any, num_envs: int) -> None:
        self.options = options
        self.num_envs = num_envs

    @classmethod
    def begins_together(cls, options: Any) -> bool:
        """Whether rows can be reset only when all have ended, so that terminations must be
        ignored; rows that rest are reset with them."""
        return False

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in rows [n] with seeds [n]; the observations of all rows, by key [N]."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, A] in each row."""
        raise NotImplementedError

    def chunk_step(self, actions: np.ndarray, lengths: np.ndarray) -> BatchStep:
        """Execute the first ``lengths`` [N] of the actions [N, C, A] of each row.

        A row has fewer than C where its time limit comes first, and none while it rests. All of
        them count as executed, also those behind a success that the simulator found on the way.
        """
        raise NotImplementedError

    def seed_shifts(self) -> np.ndarray:
        """[N] int64, by how much the last reset moved on from a seed that it could not start."""
        return np.zeros(self.num_envs, np.int64)

    def task_ids(self) -> np.ndarray:
        """[N] int64, which of ``task_descriptions`` each row is in."""
        return np.zeros(self.num_envs, np.int64)

    def render(self, row: int) -> np.ndarray:
        """Return a picture of a row, uint8 [H, W, 3]."""
        raise RuntimeError(_NO_PICTURES)

    def close(self) -> None:
        """End the simulation."""


def require_methods(name: str, adapter: type[Simulator]) -> None:
    """Refuse an adapter, before one is built, that lacks a method, or has one that cannot be
    called as the host calls it.

    Raises:
        ConfigError: Names the method, and its arguments.
    """
    where = f"env type `{name}` is broken: {adapter.__module__}.{adapter.__qualname__}"
    for method, given in _called(adapter).items():
        function = getattr(adapter, method)
        if any(function is getattr(base, method, None) for base in (SimulatorEnv, SimulatorBatch)):
            raise ConfigError(f"{where} has no method `{method}`", key="type")
        named = {each: 0 for each in given if each == "seed"}
        try:
            inspect.signature(function).bind(None, *given[len(named) :], **named)
        except TypeError as error:
            raise ConfigError(
                f"{where}.{method} is called with ({', '.join(given)}), which it does not take: "
                f"{error}",
                key="type",
            ) from error


def _called(adapter: type[Simulator]) -> dict[str, tuple[str, ...]]:
    """Methods that an adapter must have, and the arguments of each; ``seed`` goes by its name."""
    if issubclass(adapter, SimulatorBatch):
        whole, one = {"chunk_step": ("actions", "lengths")}, {"step": ("actions",)}
        return {"reset": ("rows", "seeds"), **(whole if adapter.whole_chunks else one)}
    if not issubclass(adapter, SimulatorEnv):
        return {}
    by_parts = adapter.step is SimulatorEnv.step
    if by_parts and adapter.step_blind is SimulatorEnv.step_blind:
        by_parts = False  # what is missing is `step`
    parts: dict[str, tuple[str, ...]] = {"step_blind": ("action",), "observe": ()}
    return {"reset": ("seed",), **(parts if by_parts else {"step": ("action",)})}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what a simulator prints when it is imported or built."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def package_folder(module: str) -> Path:
    """Return where a package lies, without importing it."""
    found = importlib.util.find_spec(module)
    return Path(next(iter(found.submodule_search_locations or ()))) if found else Path()


def spaced(name: str) -> str:
    """Return ``PickPlaceCan`` as ``pick place can``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def require_package(name: str, needs: Requirements) -> None:
    """Refuse an interpreter that lacks the simulator of an env type.

    Raises:
        ConfigError: It does; with the command that makes an environment for it.
    """
    if importlib.util.find_spec(needs.module) is None:
        raise ConfigError(
            f"the env type `{name}` needs the package {needs.module}, which {sys.executable} does "
            f"not find; `rlinf env install {name}` makes an environment that has it",
            key="type",
        )


@contextlib.contextmanager
def importing(name: str, remedy: str) -> Iterator[None]:
    """Say in one line that this interpreter cannot import what an env type needs, and the remedy,
    or what the machine lacks; without either, whoever made the interpreter is left to read the
    trace.

    Raises:
        ConfigError: It cannot, and it is known what helps.
    """
    try:
        yield
    except ImportError as error:
        helps = _missing_on_machine(error) or remedy
        if not helps:
            raise
        why = f"{sys.executable} cannot run env type `{name}`: {told(error)}; {helps}"
        raise ConfigError(why, key="type") from error


def _missing_on_machine(error: ImportError) -> str:
    """What installs the shared library that an import did not find, unless a Python package of this
    interpreter should have brought it; empty for any other error."""
    missing = re.search(r"([^\s/:'\"]+): cannot open shared object file", str(error))
    if missing is None:
        return ""
    library = missing[1]
    installed = (file for each in importlib.metadata.distributions() for file in each.files or ())
    if any(file.name == library for file in installed):
        return ""
    return f"the machine lacks {library}, which its package manager installs"


def require_known(key: str, value: str, known: Sequence[str]) -> None:
    """Refuse an option that is none of the known ones.

    Raises:
        ConfigError: With the nearest legal value.
    """
    if value not in known:
        raise ConfigError(f"no {key} `{value}`; {did_you_mean(value, known)}", key=f"options.{key}")


def require_within(key: str, value: float, low: int, high: int) -> None:
    """Refuse an option below ``low`` or above ``high``.

    Raises:
        ConfigError: With the nearest legal value.
    """
    if not low <= value <= high:
        nearest = min(max(value, low), high)
        raise ConfigError(
            f"{value} is not within {low} and {high}; nearest: {nearest}", key=f"options.{key}"
        )


def require_picture_sizes(options: Any) -> None:
    """Refuse pictures that are too small to show anything, or larger than a renderer draws.

    Raises:
        ConfigError: With the nearest legal value.
    """
    for key in ("image_size", "render_size"):
        if hasattr(options, key):
            require_within(key, getattr(options, key), *PICTURE_SIZES)


ADAPTERS = {
    "aloha": "rlinf.envs.gymnasium_tasks:AlohaEnv",
    "behavior": "rlinf.envs.household.behavior:BehaviorEnv",
    "calvin": "rlinf.envs.calvin:CalvinEnv",
    "dm_control": "rlinf.envs.dm_control.adapter:DmControlEnv",
    "franka_sim": "rlinf.envs.franka_sim:FrankaSimEnv",
    "genesis": "rlinf.envs.batches.genesis:GenesisEnv",
    "gsenv": "rlinf.envs.batches.gsenv:GSEnv",
    "gymnasium": "rlinf.envs.gymnasium_env:GymnasiumEnv",
    "gymnasium_robotics": "rlinf.envs.gymnasium_tasks:GymnasiumRoboticsEnv",
    "isaaclab": "rlinf.envs.batches.isaaclab:IsaacLabEnv",
    "libero": "rlinf.envs.libero:LiberoEnv",
    "maniskill": "rlinf.envs.maniskill:ManiSkillEnv",
    "metaworld": "rlinf.envs.metaworld.adapter:MetaWorldEnv",
    "mjlab": "rlinf.envs.batches.mjlab:MjlabEnv",
    "panda_gym": "rlinf.envs.gymnasium_tasks:PandaGymEnv",
    "pusht": "rlinf.envs.gymnasium_tasks:PushTEnv",
    "put_on_plate": "rlinf.envs.batches.put_on_plate:PutOnPlateEnv",
    "robocasa": "rlinf.envs.household.robocasa:RobocasaEnv",
    "robosuite": "rlinf.envs.robosuite_env:RobosuiteEnv",
    "robotwin": "rlinf.envs.household.robotwin:RobotwinEnv",
    "roboverse": "rlinf.envs.batches.roboverse:RoboVerseEnv",
    "xarm": "rlinf.envs.gymnasium_tasks:XArmEnv",
}


def _lacking(adapter: type[Simulator]) -> str:
    options = getattr(adapter, "Options", None)
    return "" if is_dataclass(options) else "dataclass of its options by the name of `Options`"


REGISTRY = Registry("env type", "rlinf.envs", ADAPTERS, Simulator, _lacking)
"""This table, and the entry points of other packages. To import an adapter does not import its
simulator."""
