"""What a policy must know of an env: names, shapes and limits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import INSTRUCTION_KEY, VECTORS, Simulator, observation_type
from rlinf.envs.observation_names import is_depth, present, steps_shown, without_earlier
from rlinf.envs.results import ACTION_MASK, TASK_IDS
from rlinf.errors import ConfigError

if TYPE_CHECKING:  # which Python 3.8 cannot make
    Box = tuple[tuple[float, ...], tuple[float, ...]]
    """Lowest and highest actions, [A] each."""

ENV_SPEC_FILE = "env_spec.json"
"""Of a run directory: what the policy was trained on, so that it can be built without the
simulator."""


@dataclass(frozen=True)
class EnvSpec:
    """Shapes of one env, without the leading env dimension."""

    observation_shapes: dict[str, tuple[int, ...]]
    observation_dtypes: dict[str, str]
    """numpy type names (``float32``, ``uint8``)."""
    action_kind: str
    """``continuous`` (Box) or ``discrete``."""
    action_dim: int
    """A; of discrete actions how many are chosen at a time, each of which travels as its index."""
    action_low: tuple[float, ...]
    """[A]; 0 for discrete actions."""
    action_high: tuple[float, ...]
    """[A]; number of choices - 1 for discrete actions."""
    task_descriptions: tuple[str, ...]
    """In words; empty when the simulator has none. Where there are several, observations hold
    ``task_ids``, the index of the present one."""
    max_episode_steps: int
    """Primitive steps after which an episode is truncated."""
    task_sections: tuple[int, ...] = ()
    """Of several simulators in one batch: which of them each task is of. Their states have nothing
    to do with each other. Empty where there is one."""
    control_rate: float | None = None
    """Actions per second; None where it is not known."""
    chain_length: int = 0
    """Tasks that follow each other within an episode; 0 where it is of one, and where simulators
    differ in it, see ``task_chains``."""
    action_start: tuple[float, ...] = ()
    """[A]; what the environment itself calls the discrete actions of index 0. Empty: 0, as in specs
    that were written before there was this key."""
    section_limits: tuple[Box, ...] = ()
    """Of each of several simulators in one batch the lowest and highest actions, in the dimensions
    that it has. Empty where there is one, where actions are discrete, and in specs that were
    written before there was this key."""
    state_parts: tuple[tuple[str, int], ...] = ()
    """Name and size of each part of ``states``, in their order. Empty where nobody says, and in
    specs that were written before there was this key."""
    task_chains: tuple[int, ...] = ()
    """Where several simulators in one batch differ in their ``chain_length``: that of each task's.
    Empty where they do not, and in specs that were written before there was this key."""

    @property
    def choices(self) -> tuple[int, ...] | None:
        """[A] numbers of choices of discrete actions, None for continuous ones."""
        if self.action_kind != "discrete":
            return None
        return tuple(int(high) + 1 for high in self.action_high)

    @property
    def own_limits(self) -> tuple[list[float], list[float]]:
        """[A] each, lowest and highest actions in the units of the environment."""
        low, high = (self.in_units(np.array(each)) for each in (self.action_low, self.action_high))
        return low.tolist(), high.tolist()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Of each simulator the limits of its actions; none of discrete ones, and of several in
        specs that were written before these said it."""
        if self.action_kind == "discrete" or (self.task_sections and not self.section_limits):
            return ()
        return self.section_limits or ((self.action_low, self.action_high),)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the observations that are pictures."""
        types = self.observation_dtypes
        return tuple(n for n, kind in types.items() if kind == "uint8" and n != INSTRUCTION_KEY)

    @property
    def seen_by_cameras(self) -> tuple[str, ...]:
        """Names of the observations that are pictures, and of their depth."""
        return (*self.pictures, *filter(is_depth, self.observation_shapes))

    def in_units(self, actions: np.ndarray) -> np.ndarray:
        """Actions [..., A] as the environment itself calls them, of those that travel here as
        indices."""
        if not self.action_start:
            return actions
        called: np.ndarray = actions + np.array(self.action_start, actions.dtype)
        return called

    def of_units(self, actions: np.ndarray) -> np.ndarray:
        """Actions [..., A] as they travel here, of what the environment itself calls them."""
        if not self.action_start:
            return actions
        indices: np.ndarray = actions - np.array(self.action_start, actions.dtype)
        return indices

    def within_sections(self, actions: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        """Actions [B, C, A] of the tasks [B], each in the limits of its simulator; as they are in
        dimensions that this lacks."""
        if not self.section_limits:
            return actions
        clipped = actions.copy()
        for row, task in enumerate(tasks.tolist()):
            low, high = np.array(self.section_limits[self.task_sections[task]], actions.dtype)
            own = clipped[row, :, : len(low)]
            np.clip(own, low, high, out=own)
        return clipped

    @property
    def task_names(self) -> tuple[str, ...]:
        """One of each task, to report by: its words, with its number where they are of several."""
        counts = Counter(self.task_descriptions)
        return tuple(
            f"{text} (task {number})" if counts[text] > 1 else text
            for number, text in enumerate(self.task_descriptions)
        )

    @property
    def observation_steps(self) -> int:
        """Of how many successive steps there are observations."""
        return steps_shown(self.observation_shapes)

    def of_present(self) -> EnvSpec:
        """The spec without the observations of the steps before."""
        return self.showing(without_earlier(self.observation_shapes))

    def showing(self, names: Collection[str]) -> EnvSpec:
        """The spec with these of its observations alone."""
        shapes, dtypes = self.observation_shapes, self.observation_dtypes
        return replace(
            self,
            observation_shapes={name: each for name, each in shapes.items() if name in names},
            observation_dtypes={name: each for name, each in dtypes.items() if name in names},
        )

    def of_numbers(self) -> EnvSpec:
        """What the spec says of numbers alone, not of what is shown and what there is to do."""
        return replace(self.showing(()), task_descriptions=())

    def to_json(self) -> dict[str, Any]:
        """The plain form that travels between processes."""
        return {**self.__dict__}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        """The spec whose plain form is ``data``."""
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        shapes = {key: tuple(shape) for key, shape in data["observation_shapes"].items()}
        plain["observation_shapes"] = shapes
        limits = data.get("section_limits", ())
        plain["section_limits"] = tuple((tuple(low), tuple(high)) for low, high in limits)
        plain["state_parts"] = tuple((name, size) for name, size in data.get("state_parts", ()))
        return cls(**plain)


def spec_of(env: Simulator, max_episode_steps: int) -> EnvSpec:
    """Return the spec of ``env``.

    Raises:
        ConfigError: Its spaces are not of the kind that adapters must have.
    """
    name = type(env).__name__
    boxes = _observation_boxes(env.observation_space, name)
    kind, low, high = _action_limits(env.action_space, name)
    shapes: dict[str, tuple[int, ...]] = {key: tuple(box.shape) for key, box in boxes.items()}
    dtypes = {key: np.dtype(box.dtype).name for key, box in boxes.items()}
    if len(env.task_descriptions) > 1:
        shapes[TASK_IDS], dtypes[TASK_IDS] = (), "int64"
    return EnvSpec(
        observation_shapes=shapes,
        observation_dtypes=dtypes,
        action_kind=kind,
        action_dim=len(low),
        action_low=low,
        action_high=high,
        task_descriptions=tuple(env.task_descriptions),
        max_episode_steps=max_episode_steps,
        control_rate=env.control_rate,
        chain_length=env.chain_length,
        action_start=tuple(env.action_start),
        state_parts=tuple(env.state_parts),
    )


def _observation_boxes(space: Any, name: str) -> dict[str, spaces.Box]:
    if not isinstance(space, spaces.Dict) or not space.spaces:
        what = "is empty: it shows nothing" if isinstance(space, spaces.Dict) else (
            f"must be a gymnasium.spaces.Dict, is {space}")  # fmt: skip
        raise ConfigError(f"{name}: observation_space {what}")
    boxes: dict[str, spaces.Box] = {}
    for key, part in space.spaces.items():
        wanted = observation_type(key)
        if wanted is None:
            raise ConfigError(
                f"{name}: unknown observation key '{key}'; known: states, proprioception, "
                "main_images, wrist_images, extra_view_images, images.NAME, depth.NAME"
            )
        if not isinstance(part, spaces.Box) or part.dtype != wanted:
            raise ConfigError(f"{name}: '{key}' must be a Box of {np.dtype(wanted).name}: {part}")
        boxes[key] = part
    return boxes


def _action_limits(space: Any, name: str) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    if isinstance(space, spaces.Discrete):
        space = spaces.MultiDiscrete([space.n], start=[space.start])
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        if space.start.any():
            raise ConfigError(f"{name}: discrete actions must start at 0, are {space}")
        return "discrete", (0.0,) * len(space.nvec), tuple(float(n - 1) for n in space.nvec)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        low, high = (tuple(float(x) for x in limit) for limit in (space.low, space.high))
        return "continuous", low, high
    raise ConfigError(
        f"{name}: action_space must be a Box [A], Discrete or MultiDiscrete [A], is {space}"
    )


_KEEP_ORDER = "nearest: keys that keep the former order, which is that of their names"


def parts_in_words(spec: EnvSpec) -> str:
    """Of what ``states`` are made, in order."""
    return ", ".join(f"{name} [{size}]" for name, size in spec.state_parts)


def other_order(before: EnvSpec, played: EnvSpec, *, there: str) -> str:
    """How the parts of ``states`` lie otherwise than they did before, in words; empty where they do
    not, or one side does not say. One part may have another name in the same place."""
    pairs = list(zip(before.state_parts, played.state_parts))  # noqa: B905 - Python 3.8
    sizes = [[size for _, size in each.state_parts] for each in (before, played)]
    renamed = sum(old != new for old, new in pairs)
    if not pairs or (sizes[0] == sizes[1] and renamed <= 1):
        return ""
    return (
        f"the parts of states {there} as {parts_in_words(before)}, and are "
        f"{parts_in_words(played)} in the environment, where the same numbers mean something else"
    )


def refuse_other_recording(recorded: EnvSpec, played: EnvSpec, *, key: str) -> list[str]:
    """Refuse, by a ConfigError with this key, episodes of another kind of environment.

    Returns:
        Names of observations that they hold and the environment does not show, which nobody reads.
    """
    shown, shapes = played.observation_shapes, recorded.observation_shapes
    if not shapes.keys() & {TASK_IDS, INSTRUCTION_KEY}:  # all of it is of one task
        shown = {name: shape for name, shape in shown.items() if name != TASK_IDS}
    # Not the numbers of tasks: of which one a row is cannot be left out.
    beside = [name for name in shapes if name not in shown and observation_type(name) is not None]
    kept = {name: shape for name, shape in shapes.items() if name not in beside}
    compared = {
        "observation_shapes": (kept, shown),
        "action_dim": (recorded.action_dim, played.action_dim),
        "action_kind": (recorded.action_kind, played.action_kind),
        "choices": (recorded.choices, played.choices),
    }
    for name, (theirs, own) in compared.items():
        if theirs != own:
            raise ConfigError(
                f"the episodes have {name} {theirs}, the environments of env.train {own}; "
                "record episodes there with: rlinf record",
                key=key,
            )
    if "states" in kept and (words := other_order(recorded, played, there="were recorded")):
        raise ConfigError(f"{words}; {_KEEP_ORDER}", key=key)
    return beside


def other_limits(boxes: Sequence[Box], known: Sequence[Box], *, here: str, there: str) -> str:
    """How the first of some boxes of actions that is none of the ``known`` ones differs from them,
    in words; empty where all are, or nothing is known. One action is another in another box."""
    for low, high in boxes:
        differing = [
            [n for n, each in enumerate(zip(low, high, *other))  # noqa: B905 - Python 3.8
             if not np.allclose(each[:2], each[2:], rtol=1e-5)]
            for other in known
        ]  # fmt: skip
        if differing and all(differing):
            (first, *others), (lowest, highest) = differing[0], known[0]
            more = f" (and so {len(others)} more)" if others else ""
            return (
                f"action dimension {first} goes from {low[first]:.4g} to {high[first]:.4g} {here}, "
                f"from {lowest[first]:.4g} to {highest[first]:.4g} {there}{more}"
            )
    return ""


def refuse_other_numbers(
    trained: EnvSpec,
    played: EnvSpec,
    *,
    key: str,
    policy: str = "the policy",
    hint: str = "an environment like that",
) -> None:
    """Refuse, by a ConfigError with this key, environments whose numbers mean something else than
    in those that a ``policy`` was trained in, though its weights fit."""
    here, there = "in the environment", f"where {policy} was trained"
    if words := other_limits(played.boxes, trained.boxes, here=here, there=there):
        raise ConfigError(f"{words}: its actions would be others; nearest: {hint}", key=key)
    refuse_other_order(trained, played, key=key, policy=policy)


def refuse_other_order(
    trained: EnvSpec, played: EnvSpec, *, key: str, policy: str = "the policy"
) -> None:
    """The same of ``states`` alone, whose parts lie in another order."""
    if words := other_order(trained, played, there=f"were learnt by {policy}"):
        raise ConfigError(f"{words}; {_KEEP_ORDER}", key=key)


def written_spec(run: Path) -> EnvSpec | None:
    """What the policy of a run sees and does, as the run wrote it down; None where it did not.

    Raises:
        ConfigError: The file is damaged.
    """
    file = run / ENV_SPEC_FILE
    if not file.is_file():
        return None
    try:
        return EnvSpec.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is damaged: {type(error).__name__}: {error}; put back a copy, or delete it: "
            "the simulator is asked instead"
        ) from error


def refuse_other_training(trained: EnvSpec, played: EnvSpec, *, key: str) -> None:
    """Say, by a ConfigError with this key, how environments differ from those that a policy was
    trained in, whose weights do not fit; nothing where they do not."""
    theirs, own = _in_words(trained), _in_words(played)
    if theirs != own:
        raise ConfigError(
            f"the policy was trained on {theirs}; the environments show {own}; nearest: an "
            "environment like the first",
            key=key,
        )


def _in_words(spec: EnvSpec) -> str:
    seen = [f"{name} {list(shape)}" for name, shape in sorted(spec.observation_shapes.items())]
    return f"{', '.join(seen)} ({len(spec.task_descriptions)} tasks), actions [{spec.action_dim}]"


def joined(specs: Mapping[str, EnvSpec]) -> EnvSpec:
    """What a policy must know of several simulators together, whose rows lie in one batch.

    Vectors and actions have the largest length, the limits are the widest, and the table of tasks
    is that of one after the other; a text that several have gets the key of the simulator.

    Args:
        specs: By the keys of their sections; each has at least one task.

    Raises:
        ConfigError: They show other observations or take other kinds of actions.
    """
    (first, wanted), *others = specs.items()
    for key, spec in others:
        _refuse_other(key, spec, first, wanted)
    every = list(specs.values())
    dim = max(spec.action_dim for spec in every)
    names = [name for name in wanted.observation_shapes if name != TASK_IDS]
    shapes = {name: max(spec.observation_shapes[name] for spec in every) for name in names}
    types = {name: wanted.observation_dtypes[name] for name in names}
    shapes[TASK_IDS], types[TASK_IDS] = (), "int64"
    if any(spec.action_dim < dim for spec in every):
        shapes[ACTION_MASK], types[ACTION_MASK] = (dim,), "bool"
    said = [set(spec.task_descriptions) for spec in every]
    tasks = [
        (number, f"{text} ({key})" if sum(text in each for each in said) > 1 else text)
        for number, (key, spec) in enumerate(specs.items())
        for text in spec.task_descriptions
    ]

    alike = len({spec.chain_length for spec in every}) == 1

    def limits(name: str, dimension: int) -> list[float]:
        return [getattr(s, name)[dimension] for s in every if dimension < s.action_dim]

    return EnvSpec(
        observation_shapes=shapes,
        observation_dtypes=types,
        action_kind=wanted.action_kind,
        action_dim=dim,
        action_low=tuple(min(limits("action_low", n)) for n in range(dim)),
        action_high=tuple(max(limits("action_high", n)) for n in range(dim)),
        task_descriptions=tuple(text for _, text in tasks),
        max_episode_steps=max(spec.max_episode_steps for spec in every),
        task_sections=tuple(number for number, _ in tasks),
        control_rate=wanted.control_rate if len({s.control_rate for s in every}) == 1 else None,
        chain_length=wanted.chain_length if alike else 0,
        action_start=wanted.action_start,
        state_parts=wanted.state_parts if len({s.state_parts for s in every}) == 1 else (),
        section_limits=tuple((s.action_low, s.action_high) for s in every if not wanted.choices),
        task_chains=() if alike else tuple(every[number].chain_length for number, _ in tasks),
    )


def refuse_foreign_actions(
    smallest: Sequence[float],
    largest: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    what: str,
    key: str = "",
    known: str = "the environment",
    beyond: float = 0.05,
    hint: str = "actions in the units of the environment (not normalised, nor raw)",
) -> None:
    """Refuse recorded actions, by their range [A], that are none of an environment's box [A].

    Args:
        smallest: [A] of the recorded ones, as ``largest``.
        largest: The other end.
        low: [A] of the box, as ``high``.
        high: The other end.
        what: Where they come from.
        key: Of the recipe, for the error.
        known: What the box is of.
        beyond: This share of the width of a dimension may be beyond it: what was recorded of
            people is.
        hint: What would be legal.

    Raises:
        ConfigError: Names the dimensions; and two that fit when they are swapped.
    """

    def fits(place: int, box: int) -> bool:
        slack = beyond * (high[box] - low[box]) + 1e-6
        return low[box] - slack <= smallest[place] and largest[place] <= high[box] + slack

    outside = [place for place in range(len(low)) if not fits(place, place)]
    if not outside:
        return
    first = outside[0]
    swapped = [
        place for place in range(len(low))
        if place != first and fits(first, place) and fits(place, first)
    ]  # fmt: skip
    nearest = (
        f"they fit with dimensions {first} and {swapped[0]} swapped"
        if swapped
        else f"nearest: {hint}"
    )
    raise ConfigError(
        f"{what}: action dimension {first} goes from {smallest[first]:.4g} to "
        f"{largest[first]:.4g}, in {known} from {low[first]:.4g} to {high[first]:.4g}"
        f"{f' (and so {len(outside) - 1} more)' if len(outside) > 1 else ''}; {nearest}",
        key=key,
    )


def _refuse_other(key: str, spec: EnvSpec, first: str, wanted: EnvSpec) -> None:
    own, theirs = (set(each.observation_shapes) - {TASK_IDS} for each in (spec, wanted))
    if own != theirs:
        raise ConfigError(
            f"shows {', '.join(sorted(own))}, {first} {', '.join(sorted(theirs))}: "
            f"{', '.join(sorted(own ^ theirs))} is not in both; nearest: an environment, or "
            f"options of it, that shows {', '.join(sorted(theirs))}",
            key=key,
        )
    for name in sorted(own):
        shape, other = spec.observation_shapes[name], wanted.observation_shapes[name]
        if shape != other and present(name) not in VECTORS:
            raise ConfigError(
                f"shows {name} {list(shape)}, {first} {list(other)}, and pictures are not padded; "
                f"nearest: {list(other)}",
                key=key,
            )
    kinds = [
        f"{' × '.join(map(str, each.choices or ()))} {each.action_kind}".strip()
        for each in (spec, wanted)
    ]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"takes {kinds[0]} actions, {first} {kinds[1]} ones, and one policy gives one kind; "
            f"nearest: an environment with {kinds[1]} actions",
            key=key,
        )
    starts = [list(each.action_start or (0.0,) * each.action_dim) for each in (spec, wanted)]
    if spec.choices is not None and starts[0] != starts[1]:
        raise ConfigError(
            f"numbers its actions from {starts[0]} on, {first} from {starts[1]}, and what one "
            f"policy does has one name; nearest: an environment that numbers them as {first}",
            key=key,
        )
