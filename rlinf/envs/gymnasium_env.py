"""Any environment that ``gymnasium.make`` knows."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

from rlinf.config.nearest import nearest_names
from rlinf.envs.base import (
    INSTRUCTION_KEY,
    INSTRUCTION_SHAPE,
    Observation,
    SimulatorEnv,
    instruction_bytes,
)
from rlinf.envs.gymnasium_pictures import PictureSpace
from rlinf.envs.results import FaultReason
from rlinf.envs.supervised.checks import EnvSideFault, checked_flag
from rlinf.errors import ConfigError, told

INTERVENED = "intervene_action"
"""Entry of ``info`` by which SERL and HIL-SERL tell the action of a person who took over."""
MOST_CHOICES = 1024
"""Values of an action of whole numbers, each of which has a logit of its own."""


@dataclass(frozen=True)
class GymnasiumOptions:
    """Options of the ``gymnasium`` env type."""

    id: str
    """What ``gymnasium.make`` is called with: ``Pendulum-v1``, or ``module:Name-v0``."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``gymnasium.make``."""

    success_key: str | None = None
    """The entry of ``info`` that says whether the task is solved, for example ``is_success``."""

    success_return: float | None = None
    """The return from which on an episode, once it is over, counts as a success."""

    reset_options: dict[str, Any] | None = None
    """What ``reset`` is given as ``options``."""

    instruction: str | None = None
    """What is to be done, in words, for policies that read it."""

    render_mode: str | None = "rgb_array"
    """How ``render`` draws; null, and for an environment that takes no ``render_mode``: it is made
    without."""

    deterministic: bool | None = None
    """Whether the same seed and actions give the same floats. null: as it is registered, so that
    ``gymnasium.register(…, nondeterministic=True)`` is false."""

    replayable: bool | None = None
    """Whether an env that was lost, or a resumed one, may be rebuilt by repeating its actions since
    the reset, at full speed; false for a real arm, whose episode is closed instead. null: as
    ``deterministic``."""


class GymnasiumEnv(SimulatorEnv):
    """A ``gymnasium`` environment behind the adapter protocol.

    A picture becomes ``main_images``, several of a dictionary ``images.NAME``, see
    :class:`PictureSpace`; a ``Text`` the ``instruction``; all else is flattened to ``states`` (what
    is discrete as one-hot). Actions are ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    of any shape, flattened; a ``Box`` of whole numbers is a choice for each.
    """

    Options = GymnasiumOptions
    example: ClassVar[dict[str, Any]] = {"id": "Pendulum-v1"}

    def __init__(self, options: GymnasiumOptions) -> None:
        super().__init__(options)
        self._options = options
        if options.instruction is not None:
            self.task_descriptions = (options.instruction,)
        try:
            self._env = _made(options)
        except gymnasium.error.Error as error:
            why = f"{str(error).rstrip('.')}{_unregistered(options.id)}"
            raise ConfigError(why, key="options.id") from error
        except TypeError as error:
            why = str(error).partition("\n")[0]
            keys = {"keyword argument": "options.kwargs", "gymnasium.Env": "options.id"}
            found = [key for words, key in keys.items() if words in why]
            if missing := _missing_arguments(error):
                why, found = missing, ["options.kwargs"]
            if not found:
                raise
            raise ConfigError(why, key=found[0]) from error
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self._env, name, None), gymnasium.Space):
                raise ConfigError(
                    f"{options.id} has no {name}, which gymnasium.spaces describe; set it in its "
                    "__init__",
                    key="options.id",
                )
        self.control_rate = _control_rate(self._env)
        self.deterministic, self.replayable = _repeats(options, self._env)
        leaves = dict(_leaves(self._env.observation_space))
        self._instruction = _instruction(options.id, leaves)
        pictures = {
            path: picture
            for path, space in leaves.items()
            if (picture := PictureSpace.of(f"the observation{_named(path)} of {options.id}", space))
        }
        others = (*pictures, *([] if self._instruction is None else [self._instruction]))
        vectors = {path: leaf for path, leaf in leaves.items() if path not in others}
        if not all(leaf.is_np_flattenable for leaf in vectors.values()):
            raise ConfigError(f"{options.id} has observations of varying size", key="options.id")
        only = len(pictures) == 1
        self._pictures = {
            "main_images" if only else f"images.{_camera(path, pictures)}": (path, picture)
            for path, picture in pictures.items()
        }
        if len(self._pictures) < len(pictures):
            raise ConfigError(
                f"{options.id} shows pictures whose names differ in marks alone: "
                f"{', '.join(each[-1] for each in pictures)}; rename one of them",
                key="options.id",
            )
        parts: dict[str, gymnasium.Space[Any]] = {
            name: picture.space for name, (_, picture) in self._pictures.items()
        }
        self._vectors = {path: _flattening(path, leaf) for path, leaf in vectors.items()}
        if vectors:
            self.state_parts, parts["states"] = _states_of(vectors)
        if self._instruction is not None:
            parts[INSTRUCTION_KEY] = spaces.Box(0, 255, INSTRUCTION_SHAPE, np.uint8)
        self.observation_space = spaces.Dict(parts)
        self._shows: gymnasium.Space[Any] = self._env.observation_space
        self._has_keys = isinstance(self._shows, spaces.Dict)
        self._takes: gymnasium.Space[Any] = self._env.action_space
        self.action_space = _flat_action_space(self._takes, options.id)
        self.action_start = _first_choices(self._takes)
        self._seen: set[str] = set()
        self._return, self._acted, self._remarked, self._intervened = 0.0, False, False, False
        self.judged_at_end = options.success_return is not None

    @classmethod
    def draws_by_mujoco(cls, options: GymnasiumOptions) -> bool:
        """Gymnasium's own of that kind; of others it is known once their module is imported."""
        if ":" in options.id:
            return importlib.util.find_spec("mujoco") is not None
        known = gymnasium.registry.get(options.id)
        return known is not None and ".mujoco" in str(known.entry_point)

    @classmethod
    def modules(cls, options: Any) -> tuple[str, ...]:
        """That of ``module:Name-v0``."""
        module, colon, _ = str(getattr(options, "id", "")).partition(":")
        return (module,) if colon else ()

    @classmethod
    def check(cls, options: GymnasiumOptions, max_episode_steps: int) -> None:
        """Refuse an id that is not registered, or whose module does not exist.

        What a module registers is known when the env process imports it.
        """
        if options.success_key is not None and options.success_return is not None:
            raise ConfigError(
                "success is said by one of success_key and success_return; nearest: null",
                key="options.success_return",
            )
        module, colon, _ = options.id.partition(":")
        try:
            if not colon:
                gymnasium.spec(options.id)
            elif importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"there is no module `{module}`, neither installed nor in {Path.cwd()}; give "
                    "the command where its file lies",
                    key="options.id",
                )
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(str(error), key="options.id") from error

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode."""
        self._look_for_success_key()
        self._seen.clear()
        self._acted = False
        try:
            given = options or self._options.reset_options
            observation, info = _several(self._env.reset(seed=seed, options=given))
        except ValueError as error:
            _explain(error, "reset", "observation, info")
            raise
        self._return = 0.0
        return self._converted(observation), info

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute one action."""
        given = self._given(action)
        try:
            observation, reward, terminated, truncated, info = self._env.step(given)
        except ValueError as error:
            _explain(error, "step", "observation, reward, terminated, truncated, info")
            raise
        if not isinstance(info, Mapping):
            raise EnvSideFault(FaultReason.MALFORMED, f"step returns {info} as info, no mapping")
        if INTERVENED in info and not self._intervened:
            self._intervened = True
            self._remark_on(
                f"{self._options.id} had `{INTERVENED}` in its info: interventions are not "
                "supported yet, and what is recorded and learnt from beside what followed is the "
                "action of the policy, not the one that was executed."
            )
        if (key := self._options.success_key) is not None:
            self._seen.update(info)
            self._acted = True
            if terminated or truncated:
                self._look_for_success_key()
            info = {**info, "success": checked_flag(key, info)}
        elif self._options.success_return is not None:
            with suppress(TypeError, ValueError):  # what is no number is refused by who reads it
                self._return += float(reward)
            info = {**info, "success": self._return >= self._options.success_return}
        return self._converted(observation), reward, terminated, truncated, info

    def _look_for_success_key(self) -> None:
        """Refuse the key once an episode is over of which no step had it, but one with a name like
        it; where none is like it, remark on that, as the key may come with success alone."""
        key, name = self._options.success_key, self._options.id
        if key is None or key in self._seen or not self._acted:
            return
        if near := nearest_names(key, self._seen):
            raise ConfigError(
                f"the info of {name} has no `{key}`; nearest: {near[0]}", key="options.success_key"
            )
        if not self._remarked:
            self._remarked = True
            found = ", ".join(sorted(map(str, self._seen))) or "nothing"
            self._remark_on(
                f"No step of an episode of {name} had `{key}` in its info, which has {found}: "
                "unless it comes with success alone, options.success_key is to be another."
            )

    def _remark_on(self, words: str) -> None:
        """Add to what is to be told, which may be of the same episode."""
        self.remark = f"{self.remark} {words}".lstrip()

    def render(self) -> Any:
        """Return a picture, uint8 [H, W, 3]."""
        frame, mode = None, self._options.render_mode
        with suppress(NotImplementedError):  # of a class without a method of its own
            frame = self._env.render()
        if not isinstance(frame, np.ndarray):
            near = "options.render_mode: rgb_array"
            raise RuntimeError(
                f"with `options.render_mode: {mode or 'null'}` {self._options.id} draws no "
                f"pictures; nearest: {'no video' if mode == 'rgb_array' else near}"
            )
        return frame

    @property
    def simulation(self) -> Any:
        """The environment on MuJoCo whose simulation is all that changes between two resets beside
        what is counted here; None where there is none, or who knows what else."""
        return self._env.unwrapped if _is_mujoco_task(self._env) else None

    def get_state(self) -> dict[str, Any] | None:
        """Of a :attr:`simulation`, with what was counted."""
        task, limit = self.simulation, _time_limit(self._env)
        if task is None:
            return None
        from rlinf.envs.mujoco.state import simulation_state

        return {
            "simulation": simulation_state(task.model, task.data),
            "return": self._return,
            "seen": {str(name): True for name in self._seen},
            "steps": None if limit is None else limit._elapsed_steps,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        from rlinf.envs.mujoco.state import continue_simulation

        task, limit = self.simulation, _time_limit(self._env)
        continue_simulation(task.model, task.data, state["simulation"])
        self._return, self._seen = state["return"], set(state["seen"])
        self._acted = bool(self._seen)
        if limit is not None:
            limit._elapsed_steps = state["steps"]

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _given(self, action: Any) -> Any:
        """The action as the environment takes it."""
        space = self._takes
        if isinstance(space, spaces.Discrete):
            return int(np.asarray(action).reshape(())) + int(space.start)
        given = np.asarray(action, space.dtype).reshape(space.shape or ())
        if isinstance(space, spaces.MultiDiscrete):
            return given + space.start
        if isinstance(space, spaces.MultiBinary):
            return given
        assert isinstance(space, spaces.Box)
        if np.issubdtype(space.dtype, np.integer):
            return given + space.low
        if space.dtype != np.float32:  # the bound that was rounded may lie beyond its own
            given = np.clip(given, space.low, space.high)
        return given

    def _converted(self, observation: Any) -> Observation:
        if self._has_keys:
            _refuse_other_keys(observation, self._shows)
        found = {
            name: picture.read(_at(observation, path))
            for name, (path, picture) in self._pictures.items()
        }
        if self._vectors:
            parts = [flat(_at(observation, path)) for path, flat in self._vectors.items()]
            # A copy: the simulator may keep its array.
            found["states"] = np.concatenate(parts, dtype=np.float32, casting="unsafe")
        if self._instruction is not None:
            found[INSTRUCTION_KEY] = instruction_bytes(str(_at(observation, self._instruction)))
        return found


def _made(options: GymnasiumOptions) -> Any:
    """The environment; without ``render_mode`` where it takes none, as `make` alone would make it.

    Raises:
        gymnasium.error.Error: There is none of this id.
        TypeError: It does not take these arguments.
    """
    if "render_mode" in options.kwargs:
        reason = "`render_mode` is a key beside `kwargs`: options.render_mode"
        raise ConfigError(reason, key="options.kwargs")
    given = {"disable_env_checker": True, **options.kwargs}
    module, colon, _ = options.id.partition(":")
    if colon:
        try:
            importlib.import_module(module)
        except Exception as error:  # of any kind: it is the user's own code
            why = f"{module} cannot be imported: {told(error)}"
            raise ConfigError(why, key="options.id") from error
    try:
        if options.render_mode is not None:
            with warnings.catch_warnings():
                # It is asked for unasked; a class that draws nothing says so where it is to draw.
                warnings.filterwarnings(
                    "ignore", ".*render_mode='rgb_array' that is not in the pos"
                )
                return gymnasium.make(options.id, render_mode=options.render_mode, **given)
    except TypeError as error:
        if "'render_mode'" not in str(error).splitlines()[0]:
            raise
    return gymnasium.make(options.id, **given)


def _wrappers(env: Any) -> Iterator[Any]:
    """From the outermost on."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _time_limit(env: Any) -> Any:
    """The wrapper that counts the steps of an episode; None where there is none."""
    return next((each for each in _wrappers(env) if type(each) is wrappers.TimeLimit), None)


def _is_mujoco_task(env: Any) -> bool:
    """Whether it is one of gymnasium's own on MuJoCo, in no wrapper but those of `make`."""
    known = (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, wrappers.TimeLimit)
    return (
        type(env.unwrapped).__module__.startswith("gymnasium.envs.mujoco.")
        and type(env.unwrapped.data).__module__.startswith("mujoco.")  # not the older bindings
        and all(type(each) in known for each in _wrappers(env))
    )


def _missing_arguments(error: TypeError) -> str:
    """Which arguments the class needs beside those that it was given; empty where it was called
    with all of them, and failed within."""
    called = error.__cause__  # as gymnasium met it
    within = called is None or called.__traceback__ is None or called.__traceback__.tb_next
    if within or " missing " not in str(called):
        return ""
    needed = ", ".join(f"{name}: …" for name in re.findall(r"'(\w+)'", str(called)))
    return f"{called}; nearest: {{{needed}}}"


def _unregistered(name: str) -> str:
    """That a module has a class of the name, which gymnasium knows nothing of."""
    module, _, called = name.rpartition(":" if ":" in name else ".")
    found = sys.modules.get(module)
    if not module or not isinstance(getattr(found, called, None), type):
        return ""
    return (
        f"; {module} has a class of this name, which is made known by "
        f"gymnasium.register(id='{called}-v0', entry_point={called}) in it, and is then "
        f"{module}:{called}-v0"
    )


def _control_rate(env: Any) -> float | None:
    """Actions per second: as a frame is drawn after every action, the frames. Those of gymnasium's
    classic tasks are others, which have the seconds of a step."""
    inner = env.unwrapped
    if type(inner).__module__.startswith("gymnasium.envs.classic_control"):
        step = getattr(inner, "dt", None) or getattr(inner, "tau", None)
        return None if step is None else 1.0 / step
    rate = env.metadata.get("render_fps")
    return float(rate) if isinstance(rate, (int, float)) and rate > 0 else None


def _repeats(options: GymnasiumOptions, env: Any) -> tuple[bool, bool]:
    """Whether it is deterministic, and whether its actions may be repeated."""
    deterministic, replayable = options.deterministic, options.replayable
    if deterministic is None:
        deterministic = not getattr(env.spec, "nondeterministic", False)
    return deterministic, deterministic if replayable is None else replayable


def _explain(error: ValueError, method: str, returned: str) -> None:
    """Say what has to be returned, where the environment returned something else: before gymnasium
    0.26 it was."""
    if "to unpack" in str(error):
        raise ValueError(f"{method} has to return ({returned}): {error}") from error


def _several(returned: Any) -> tuple[Any, ...]:
    """What a method returned; before gymnasium 0.26 a reset returned the observation alone, whose
    two entries would be taken for observation and info."""
    if not isinstance(returned, (tuple, list)):
        raise ValueError(f"there is one {type(returned).__name__} to unpack")
    return tuple(returned)


def _refuse_other_keys(observation: Any, space: gymnasium.Space[Any]) -> None:
    """An EnvSideFault for entries that the space does not declare, or that are missing."""
    if not isinstance(space, spaces.Dict):
        return
    if not isinstance(observation, Mapping) or observation.keys() != space.spaces.keys():
        found = sorted(observation) if isinstance(observation, Mapping) else type(observation)
        raise EnvSideFault(
            FaultReason.MALFORMED, f"the observation has {found}, its space {sorted(space.spaces)}"
        )
    for key, part in space.spaces.items():
        _refuse_other_keys(observation[key], part)


def _at(observation: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        observation = observation[key]
    return observation


def _flattening(path: tuple[str, ...], space: gymnasium.Space[Any]) -> Callable[[Any], np.ndarray]:
    """What makes a vector of a value of ``space``; an EnvSideFault where it is of another shape or
    type, which would mean something else in the same places."""
    name = _named(path)

    def refusal(value: Any) -> EnvSideFault:
        shown = " ".join(repr(value).split())[:100]
        return EnvSideFault(
            FaultReason.MALFORMED, f"the observation{name} is {shown}, not of the space {space}"
        )

    def of_box(value: Any) -> np.ndarray:
        found = np.asarray(value)
        if found.shape != shape or found.dtype.kind not in kinds:
            raise refusal(value)
        return found.reshape(-1)

    def of_others(value: Any) -> np.ndarray:
        if not space.contains(value):
            raise refusal(value)
        return np.asarray(spaces.flatten(space, value))

    if not isinstance(space, spaces.Box):
        return of_others
    shape, kinds = space.shape, "fiub" if space.dtype.kind == "f" else "iub"
    return of_box


def _states_of(
    vectors: Mapping[tuple[str, ...], gymnasium.Space[Any]],
) -> tuple[tuple[tuple[str, int], ...], spaces.Box]:
    """The named parts of ``states``, with their sizes, and the space of all of them."""
    sizes = {path: int(spaces.flatdim(leaf)) for path, leaf in vectors.items()}
    named = tuple((".".join(path), size) for path, size in sizes.items() if path)
    return named, spaces.Box(-np.inf, np.inf, (sum(sizes.values()),), np.float32)


def _leaves(
    space: gymnasium.Space[Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], gymnasium.Space[Any]]]:
    """The spaces within nested dictionaries, by their keys."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    else:
        yield path, space


def _instruction(
    name: str, leaves: Mapping[tuple[str, ...], gymnasium.Space[Any]]
) -> tuple[str, ...] | None:
    """Where the observation says in words what is to be done; None where it does not."""
    texts = [path for path, leaf in leaves.items() if isinstance(leaf, spaces.Text)]
    if len(texts) > 1:
        keys = ", ".join(".".join(path) for path in texts)
        raise ConfigError(
            f"{name} shows several texts ({keys}), of which none is known to be the instruction; "
            "nearest: one, with gymnasium.wrappers.FilterObservation",
            key="options.id",
        )
    return texts[0] if texts else None


def _named(path: tuple[str, ...]) -> str:
    return "".join(f" `{key}`" for key in path)


def _camera(path: tuple[str, ...], every: Collection[tuple[str, ...]]) -> str:
    """The last key of a picture, all of them where several pictures end in the same; with `_` for
    what is no letter, digit or `_`."""
    alone = sum(each[-1] == path[-1] for each in every) == 1
    return re.sub(r"\W", "_", path[-1] if alone else "_".join(path))


def _first_choices(space: gymnasium.Space[Any]) -> tuple[float, ...]:
    """[A] lowest values of discrete actions; nothing where they are 0, or of other actions."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        first = np.asarray(space.start)
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        first = space.low
    else:
        return ()
    return tuple(map(float, first.reshape(-1))) if first.any() else ()


def _flat_action_space(space: gymnasium.Space[Any], name: str) -> gymnasium.Space[Any]:
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.reshape(-1))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (limit.reshape(-1).astype(np.float32) for limit in (space.low, space.high))
        return spaces.Box(low, high, dtype=np.float32)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        counts = space.high.astype(np.float64) - space.low + 1
        if counts.max() <= MOST_CHOICES:
            return spaces.MultiDiscrete(counts.astype(np.int64).reshape(-1))
        raise ConfigError(
            f"the actions of {name} are {space}, whole numbers of {counts.max():.0f} values; "
            f"nearest: at most {MOST_CHOICES}, or a Box of floats which the environment rounds",
            key="options.id",
        )
    raise ConfigError(
        f"the actions of {name} are {space}; known: Box, Discrete, MultiDiscrete and MultiBinary",
        key="options.id",
    )
