"""What imitation learns from: sets of episodes, seen as the environment of a recipe shows things.

A set is one of `rlinf record` or a LeRobot set; both become a :class:`Recorded`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.config.reasons import show
from rlinf.data.augmentation import AugmentationConfig
from rlinf.data.demonstrations import Demonstrations, is_recorded
from rlinf.data.lerobot.layout import ACTION, STATE, features_of, is_lerobot, names_of
from rlinf.data.lerobot.pictures import Stacked
from rlinf.data.lerobot.reader import LeRobotSet
from rlinf.envs.base import INSTRUCTION_KEY, instruction_bytes
from rlinf.envs.observation_names import earlier, is_depth
from rlinf.envs.results import TASK_IDS
from rlinf.envs.spec import (
    EnvSpec,
    other_limits,
    other_order,
    refuse_foreign_actions,
    refuse_other_recording,
)
from rlinf.errors import ConfigError, in_section

if TYPE_CHECKING:
    from rlinf.envs.config import EnvConfig

log = logging.getLogger(__name__)
_LITTLE = 0.1
"""Of the width of a dimension: actions that keep within so much of it may be in other units."""


class Column(Protocol):
    """Rows [N, ...], all in memory or read when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """With N."""

    def __getitem__(self, rows: np.ndarray) -> np.ndarray: ...


class Earlier:
    """A column some steps before; the first row of an episode stands for those before it.

    Args:
        column: What the steps themselves show.
        firsts: [N] int64, by row the first one of its episode.
        steps: How long before.
    """

    def __init__(self, column: Column, firsts: np.ndarray, steps: int) -> None:
        self._column, self._firsts, self._steps = column, firsts, steps
        self.shape = column.shape

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return self._column[np.maximum(rows - self._steps, self._firsts[rows])]


@dataclass(frozen=True)
class Recorded:
    """Episodes of a set.

    Args:
        columns: Observations by key, each [N, ...] over all rows of the set.
        actions: [N, A] float32.
        episodes: (first row, length) of those that are learnt from.
        weight: How often rows are drawn, relative to other sets.
    """

    columns: Mapping[str, Column]
    actions: np.ndarray
    episodes: tuple[tuple[int, int], ...]
    weight: float = 1.0

    @classmethod
    def of(cls, found: Demonstrations) -> Recorded:
        """All episodes of a set in memory."""
        episodes = tuple((each.first, each.length) for each in found.episodes)
        return cls(found.observations, found.actions, episodes)

    def rows(self) -> np.ndarray:
        """[M] rows of the episodes, one behind the other."""
        return np.concatenate([np.arange(first, first + n) for first, n in self.episodes])

    def chunks(self, size: int, *, before: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The ``size`` actions from every row of the episodes on, and so many before it.

        Beyond an end of its episode the first or last action is repeated, and that is said.

        Returns:
            steps: [M, before + size] int64, rows of ``actions``.
            acted: [M, before + size] bool, False beyond the ends of the episode.
        """
        lengths = [length for _, length in self.episodes]
        firsts = np.repeat([first for first, _ in self.episodes], lengths)[:, None]
        ends = np.repeat([first + length for first, length in self.episodes], lengths)[:, None]
        steps = self.rows()[:, None] + np.arange(-before, size)
        return steps.clip(firsts, ends - 1), (firsts <= steps) & (steps < ends)

    def split(self, held_out: int) -> tuple[Recorded, Recorded]:
        """All but the last ``held_out`` episodes, and those; ConfigError where none is left."""
        refuse_none_left(held_out, len(self.episodes))
        kept, others = self.episodes[:-held_out], self.episodes[-held_out:]
        return replace(self, episodes=kept), replace(self, episodes=others)


def _warn_of_other_options(path: Path, source: Mapping[str, Any], env: EnvConfig | None) -> None:
    """Say how a set was recorded otherwise than ``env`` is made: by another camera, which nothing
    else would tell."""
    recorded = source.get("env")
    if env is None or not recorded:
        return
    own = {"type": env.type, **asdict(env.adapter_options)}
    theirs = {"type": recorded.get("type"), **recorded.get("options", {})}
    other = [
        f"{key} {show(told)} (env.train: {show(own.get(key))})"
        for key, told in theirs.items()
        if told != json.loads(json.dumps(own.get(key)))
    ]
    if other:
        log.warning("%s: recorded with %s", path, ", ".join(other))


def _warn_of_unread(path: Path, names: Sequence[str]) -> None:
    """Say which observations of a set nobody learns from."""
    if names:
        listed = ", ".join(names)
        log.warning("%s: not learnt from %s, which the environment does not show", path, listed)


def _warn_of_small_actions(
    path: Path, low: Sequence[float], high: Sequence[float], spec: EnvSpec
) -> None:
    """Say of which dimensions the actions of a set, from ``low`` to ``high`` [A], fill so little
    that they may be in other units; not of those that are never moved."""
    for lowest, highest in spec.boxes[:1]:
        small = [
            n for n, (first, last, *box) in enumerate(zip(low, high, lowest, highest, strict=True))
            if 0 < last - first < _LITTLE * (box[1] - box[0]) < np.inf
        ]  # fmt: skip
        if small:
            log.warning(
                "%s: nearly all actions of dimension %d lie from %.4g to %.4g, of %.4g to %.4g in "
                "the environment%s: are they in its units? any_action_limits: true says so",
                path, small[0], low[small[0]], high[small[0]], lowest[small[0]], highest[small[0]],
                f" (and so {len(small) - 1} more)" if len(small) > 1 else "",
            )  # fmt: skip


def refuse_none_left(held_out: int, count: int) -> None:
    """Refuse to hold out every episode of a set; ConfigError."""
    if held_out >= count:
        raise ConfigError(
            f"{held_out} of {count} episodes cannot be held out; nearest: {count - 1} (of those "
            "that only_successful, episodes and limit leave)",
            key="held_out",
        )


class SetOptions(StrictModel):
    """What is learnt of a set."""

    only_successful: bool = True
    """Leave out episodes that did not succeed; a set that does not say is taken whole."""
    episodes: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """Numbers of the episodes that count, from 0; null: all."""
    limit: int | None = Field(default=None, ge=1)
    """Take the first so many of these episodes alone; null: all."""
    observations: dict[str, str | tuple[str, ...]] = Field(default={})
    """Of a LeRobot set: by observation of the environment its feature, as `main_images:
    observation.images.front`, or several that are stacked; those that `rlinf record` writes need
    none."""
    actions: str = ACTION
    """Of a LeRobot set: the feature of the actions."""
    tasks: dict[str, str] = Field(default={})
    """By text of the set, the description that the environment has of the same task."""
    any_frame_rate: bool = False
    """Take a set although its frames per second are not the actions per second of the
    environment."""
    any_action_limits: bool = False
    """Take a set although its actions were recorded in other limits than those of the environment:
    they are in the same units all the same."""

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        for number in dict.fromkeys(self.episodes or ()):
            if (times := (self.episodes or ()).count(number)) > 1:
                alone = ", ".join(map(str, dict.fromkeys(self.episodes or ())))
                why = f"names episode {number} {times} times, which is learnt from once"
                raise illegal("episodes", why, hint=f"nearest: [{alone}]")
        return self

    def check_set(self, path: Path) -> int:
        """Look for a set, and count the episodes in it that are learnt from; ConfigError."""
        path = path.expanduser()
        with _of_key("path"):
            if is_lerobot(path) and not is_recorded(path):
                theirs = LeRobotSet(path)
                self._check_features(theirs)
                return len(self._chosen(path, _successes(theirs)))
            found = Demonstrations.load(path)
        for key in ("observations", "actions"):
            if getattr(self, key) != SetOptions.model_fields[key].default:
                raise ConfigError(
                    f"says what a LeRobot set calls things, and {path} is a set of rlinf record; "
                    "nearest: leave it out",
                    key=key,
                )
        return len(self._chosen(path, _successes(found)))

    def read(self, path: Path, spec: EnvSpec, env: EnvConfig | None = None) -> Recorded:
        """The episodes, as an environment of this spec shows things; ConfigError."""
        path, steps, spec = path.expanduser(), spec.observation_steps, spec.of_present()
        with _of_key("path"):
            if is_recorded(path):
                found: Demonstrations | LeRobotSet = Demonstrations.load(path)
                _warn_of_other_options(path, found.source, env)
                texts = _texts(EnvSpec.from_json(found.source["spec"]))
                columns, actions, rate = self._recorded(path, found, spec)
                units = replace(spec, action_start=())
                spans = [(each.first, each.length) for each in found.episodes]
            else:
                found = LeRobotSet(path)
                _warn_of_other_options(path, found.source, env)
                self._check_features(found)
                _warn_of_unread(path, self._unread(found, spec))
                texts = found.texts
                rate, spans = found.fps, [(each.first, each.length) for each in found.episodes]
                columns = self._columns(found, spec)
                actions, units = found.vectors(self.actions), self._units(found, spec)
        if other := sorted(self.tasks.keys() - set(texts)):
            worded = [text for text in texts if text.strip()]
            near = did_you_mean(other[0], worded) if worded else "none has a task in words"
            raise ConfigError(f"no episode of {path} is of `{other[0]}`; {near}", key="tasks")
        chosen = self._chosen(path, _successes(found))
        _refuse_not_finite(path, {**columns, "actions": actions}, {n: spans[n] for n in chosen})
        self._refuse_other_rate(path, rate, spec)
        learnt = [np.arange(first, first + count) for first, count in (spans[n] for n in chosen)]
        self._refuse_other_dimensions(path, actions, spec)
        actions = units.of_units(actions)
        told = found.source.get("spec") if self.actions == ACTION else None
        if told is not None:
            self._refuse_other_limits(path, EnvSpec.from_json(told), spec)
        self._refuse_other_actions(path, actions[np.concatenate(learnt)], spec, told=bool(told))
        columns = _with_earlier(columns, steps, spans)
        return Recorded(columns, actions, tuple(spans[number] for number in chosen))

    def _chosen(self, path: Path, successes: Sequence[bool]) -> list[int]:
        wanted = range(len(successes)) if self.episodes is None else sorted({*self.episodes})
        if wanted and wanted[-1] >= len(successes):
            raise ConfigError(
                f"{path} has no episode {wanted[-1]}; legal: 0 to {len(successes) - 1}",
                key="episodes",
            )
        found = [n for n in wanted if successes[n] or not self.only_successful]
        if not found:
            raise ConfigError(
                f"none of the {len(wanted)} episodes in {path} succeeded; nearest: "
                "false, or other episodes",
                key="only_successful",
            )
        return found[: self.limit]

    def _refuse_other_rate(self, path: Path, rate: float | None, spec: EnvSpec) -> None:
        wanted = spec.control_rate
        if rate and wanted and abs(rate - wanted) > 0.01 * wanted and not self.any_frame_rate:
            raise ConfigError(
                f"{path} has {rate:g} frames a second, the environment acts {wanted:g} times; "
                "nearest: a set of its rate, or any_frame_rate: true",
                key="path",
            )

    def _refuse_other_dimensions(self, path: Path, actions: np.ndarray, spec: EnvSpec) -> None:
        if actions.shape[1] != spec.action_dim:
            raise ConfigError(
                f"the episodes in {path} have action_dim {actions.shape[1]}, the environments of "
                f"env.train {spec.action_dim}; record episodes there with: rlinf record",
                key="path",
            )

    def _refuse_other_limits(self, path: Path, recorded: EnvSpec, spec: EnvSpec) -> None:
        here, there = f"where {path} was recorded", "in the environment"
        words = other_limits(recorded.boxes, spec.boxes, here=here, there=there)
        if words and not self.any_action_limits:
            raise ConfigError(
                f"{words}: its actions mean something else there, unless they are in the same "
                "units; nearest: a set recorded there, or any_action_limits: true",
                key="path",
            )

    def _refuse_other_actions(
        self, path: Path, actions: np.ndarray, spec: EnvSpec, *, told: bool
    ) -> None:
        low, high = spec.in_units(np.quantile(actions, [0.01, 0.99], axis=0)).tolist()
        refuse_foreign_actions(low, high, *spec.own_limits, what=str(path), key="path")
        if not told and not self.any_action_limits:
            _warn_of_small_actions(path, low, high, spec)

    # -- sets of ours ---------------------------------------------------------------------------

    def _recorded(
        self, path: Path, found: Any, spec: EnvSpec
    ) -> tuple[Mapping[str, Column], np.ndarray, float | None]:
        recorded = EnvSpec.from_json(found.source["spec"])
        beside = refuse_other_recording(recorded, spec, key="path")
        _warn_of_unread(path, beside)
        columns = {name: each for name, each in found.observations.items() if name not in beside}
        texts = _texts(recorded)
        if TASK_IDS not in columns and len(texts) == 1:
            # The set tells one task, or none, which must be the environment's.
            task = self._task(path, texts[0], spec)
            if TASK_IDS in spec.observation_shapes:
                columns[TASK_IDS] = np.full(len(found), task, np.int64)
        elif TASK_IDS in columns and texts != spec.task_descriptions:
            numbers = columns[TASK_IDS].astype(np.int64)
            known = {int(number): self._task(path, texts[number], spec) for number in set(numbers)}
            columns[TASK_IDS] = np.array([known[int(number)] for number in numbers], np.int64)
        return columns, found.actions, recorded.control_rate

    # -- LeRobot sets ---------------------------------------------------------------------------

    def _units(self, found: LeRobotSet, spec: EnvSpec) -> EnvSpec:
        """The spec in whose units its actions are: those of the environment, but for a set of
        `rlinf record`, which says itself where they start; one without this key holds indices."""
        own = found.source.get("spec") if self.actions == ACTION else None
        return spec if own is None else replace(spec, action_start=own.get("action_start") or ())

    def _check_features(self, found: LeRobotSet) -> None:
        """Refuse names that the set does not have, and cameras whose files are not there."""
        with _of_key("actions"):
            found.vector_parts(self.actions)
        for key, names in self.observations.items():
            for name in (names,) if isinstance(names, str) else names:
                with _of_key(f"observations.{key}"):
                    feature = found.feature(name)
                if feature.dtype == "video":
                    found.require_videos(name)

    def _unread(self, found: LeRobotSet, spec: EnvSpec) -> list[str]:
        """What `rlinf record` has in a set and nobody reads; nothing, of sets of others."""
        recorded = found.source.get("spec", {}).get("observation_shapes", {})
        given = self.observations.values()
        read = {name for each in given for name in ((each,) if isinstance(each, str) else each)}
        left = recorded.keys() - spec.observation_shapes.keys() - {TASK_IDS, INSTRUCTION_KEY}
        return sorted(key for key in left if not read & {*features_of(key, recorded[key])})

    def _columns(self, found: LeRobotSet, spec: EnvSpec) -> dict[str, Column]:
        shown = spec.observation_shapes
        unknown = sorted(set(self.observations) - set(shown))
        if unknown:
            raise ConfigError(
                f"the environment shows no `{unknown[0]}`; {did_you_mean(unknown[0], shown)}",
                key="observations",
            )
        numbers = found.text_numbers
        tasks = {
            number: self._task(found.directory, found.texts[number], spec)
            for number in set(numbers.tolist())
        }
        columns: dict[str, Column] = {}
        for key in shown:
            if key == TASK_IDS:
                known = [tasks.get(number, 0) for number in range(len(found.texts))]
                columns[key] = np.array(known, np.int64)[numbers]
            elif key == INSTRUCTION_KEY:
                columns[key] = np.stack([instruction_bytes(each) for each in found.texts])[numbers]
            else:
                columns[key] = self._column(found, key, spec)
        return columns

    def _column(self, found: LeRobotSet, key: str, spec: EnvSpec) -> Column:
        shape = spec.observation_shapes[key]
        given = self.observations.get(key) or tuple(features_of(key, shape))
        names = (given,) if isinstance(given, str) else given
        for name in names:
            if name not in found.features:
                known = [
                    n for n, each in found.features.items() if each.pictured == (len(shape) > 1)
                ]
                raise ConfigError(
                    f"{found.directory} has no `{name}` for the observation `{key}`; "
                    f"{did_you_mean(name, known) or 'it has no pictures'}",
                    key=f"observations.{key}",
                )
        if key == "states":
            _refuse_other_order(found, names, spec)
        if len(shape) == 1:
            vectors = [found.vectors(name) for name in names]
            column: Any = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
        else:
            found.check_videos(names)
            cameras = [found.pictures(name) for name in names]
            other = next((c for c in cameras if c.shape[1:] != cameras[0].shape[1:]), None)
            if other is not None:
                sizes = [list(camera.shape[1:]) for camera in (cameras[0], other)]
                raise ConfigError(
                    f"{found.directory} has pictures of {sizes[0]} and of {sizes[1]} for `{key}`, "
                    "whose views are stacked; nearest: cameras of one size",
                    key=f"observations.{key}",
                )
            column = cameras[0] if len(shape) == 3 and len(cameras) == 1 else Stacked(cameras)
        if column.shape[1:] != shape:
            raise ConfigError(
                f"`{key}` is {list(column.shape[1:])} in {found.directory}, in the environment "
                f"{list(shape)}; nearest: options of the environment that show it so",
                key=f"observations.{key}",
            )
        return column  # type: ignore[no-any-return]

    def _task(self, path: Path, text: str, spec: EnvSpec) -> int:
        """Which task of the environment a text of a set means; 0 where it has no descriptions, and
        the only one where the text is empty."""
        known = {_words(each): number for number, each in enumerate(spec.task_descriptions)}
        wanted = self.tasks.get(text, text)
        if not known:
            return 0
        if not wanted.strip():
            first, *others = spec.task_descriptions
            if others:
                raise ConfigError(
                    f"{path} says no task, and the environment has {len(spec.task_descriptions)}; "
                    f"{did_you_mean(wanted, spec.task_descriptions)}; say which, for example "
                    f"tasks: {{{json.dumps(text)}: {first}}}",
                    key="tasks",
                )
            log.warning("%s says no task: taken for `%s`, the environment's only one", path, first)
            return 0
        if _words(wanted) not in known:
            raise ConfigError(
                f"the environment has no task `{wanted}`; "
                f"{did_you_mean(wanted, spec.task_descriptions)}; if it is one of these, say so",
                key="tasks",
            )
        return known[_words(wanted)]


class MixedSetConfig(SetOptions):
    """One of several sets."""

    path: Path
    """Directory of the set."""
    weight: float = Field(default=1.0, gt=0)
    """How often its rows are drawn, relative to the weights of the others."""


class DemonstrationsConfig(SetOptions):
    """Recorded episodes that a policy is to imitate: one set, or several."""

    path: Path | None = None
    """Directory of a set, as `rlinf record` writes it, or of a LeRobot set."""
    sets: tuple[MixedSetConfig, ...] = ()
    """Instead of `path`: sets, each with its weight and options."""
    held_out: int = Field(default=0, ge=0)
    """So many episodes of each set, the last ones, are not trained on, but validate."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """How pictures vary that are trained on."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order, of the mixture and of the augmentation."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if (self.path is None) == (not self.sets):
            given = "neither is" if self.path is None else "both are"
            raise illegal("path", f"{given} given of path and sets", hint="one of them")
        # By value, not by whether it was written: a run writes down what it was not told, too.
        misplaced = [name for name, field in SetOptions.model_fields.items()
                     if getattr(self, name) != field.default]  # fmt: skip
        if self.sets and misplaced:
            key = misplaced[0]
            raise illegal(key, "is said of no set", hint=f"write it as sets.0.{key} …")
        return self

    @property
    def validates(self) -> bool:
        """Whether there are episodes to validate on."""
        return self.held_out > 0

    def check(self) -> None:
        """Look for the sets, and for episodes to learn from beside those that validate."""
        super().check()
        if self.path is not None:
            refuse_none_left(self.held_out, self.check_set(self.path))
        for place, each in enumerate(self.sets):
            with in_section(f"sets.{place}"):
                count = each.check_set(each.path)
            refuse_none_left(self.held_out, count)

    def build(
        self, spec: EnvSpec, env: EnvConfig | None = None
    ) -> tuple[list[Recorded], list[Recorded]]:
        """What is trained on, and what validates; ConfigError where nothing is left.

        Args:
            spec: How the environment shows things.
            env: How it was made; a line of the log says where a set was recorded otherwise.
        """
        if self.augmentation != AugmentationConfig() and not spec.pictures:
            raise ConfigError("the environment shows no pictures; leave it out", key="augmentation")
        if self.augmentation.crop != (1.0, 1.0) and any(map(is_depth, spec.observation_shapes)):
            raise ConfigError(
                "a crop would move pictures against their depth, which the environment shows; "
                "nearest: [1, 1], or no depth",
                key="augmentation.crop",
            )
        if self.path is not None:
            found = [self.read(self.path, spec, env)]
        else:
            found = []
            for place, each in enumerate(self.sets):
                with in_section(f"sets.{place}"):
                    found.append(replace(each.read(each.path, spec, env), weight=each.weight))
        if not self.held_out:
            return found, []
        parts = [each.split(self.held_out) for each in found]
        return [kept for kept, _ in parts], [others for _, others in parts]


def _with_earlier(
    columns: Mapping[str, Column], steps: int, spans: Sequence[tuple[int, int]]
) -> Mapping[str, Column]:
    """Beside each observation those of the steps before it."""
    firsts = np.repeat([first for first, _ in spans], [length for _, length in spans])
    return {
        earlier(key, back): Earlier(column, firsts, back) if back else column
        for key, column in columns.items()
        for back in range(1 if key in (TASK_IDS, INSTRUCTION_KEY) else steps)
    }


@contextmanager
def _of_key(key: str) -> Iterator[None]:
    """Let a ConfigError without a key be one of ``key``."""
    try:
        yield
    except ConfigError as error:
        error.key = error.key or key
        raise


def _refuse_not_finite(
    path: Path, columns: Mapping[str, Column], spans: Mapping[int, tuple[int, int]]
) -> None:
    """Of the episodes that are learnt from, (first row, length) by their numbers."""
    for name, column in columns.items():
        if not isinstance(column, np.ndarray) or column.dtype.kind != "f":
            continue  # pictures, which may lie in files
        good = np.asarray(np.isfinite(column.reshape(len(column), -1)).all(axis=1))
        if good.all():
            continue
        bad = {n: int((~good[first:][:length]).sum()) for n, (first, length) in spans.items()}
        bad = {number: count for number, count in bad.items() if count}
        if bad:
            number = min(bad)
            first, length = spans[number]
            raise ConfigError(
                f"`{name}` of {path} holds a NaN or an infinity in {sum(bad.values())} rows of "
                f"{len(bad)} episodes, first in step {int(np.argmin(good[first:][:length]))} of "
                f"episode {number}; record them again, or name the others in `episodes`",
                key="path",
            )


def _texts(recorded: EnvSpec) -> tuple[str, ...]:
    """By number of the task what a set of `rlinf record` says in words of it: as in a LeRobot set,
    an empty text where there is nothing; none where every row has its own."""
    if INSTRUCTION_KEY in recorded.observation_shapes:
        return recorded.task_descriptions
    return recorded.task_descriptions or ("",)


def _refuse_other_order(found: LeRobotSet, names: Sequence[str], spec: EnvSpec) -> None:
    """Refuse features in which the parts of ``states`` lie in another order, where the set says in
    which: as `rlinf record` wrote it down, or by a name of each number."""
    recorded, words = found.source.get("spec"), ""
    if recorded is not None and list(names) == [STATE]:
        words = other_order(EnvSpec.from_json(recorded), spec, there="were recorded")
    told = [each for name in names for each in found.features[name].names]
    own = names_of(spec.state_parts)
    if not words and told != own and sorted(told) == sorted(own):
        words = (
            f"the set has {', '.join(told)}, and the environment the same in another order: "
            f"{', '.join(own)}"
        )
    if words:
        near = "nearest: an environment whose parts lie as those of the set"
        raise ConfigError(f"{found.directory}: {words}; {near}", key="observations.states")


def _successes(found: Demonstrations | LeRobotSet) -> Sequence[bool]:
    if isinstance(found, LeRobotSet):
        return found.success
    return [each.success for each in found.episodes]


def _words(text: str) -> str:
    """A text without what people write differently."""
    return " ".join(text.lower().replace("_", " ").replace("-", " ").split()).rstrip(". ")


class WeightedDraws:
    """Rows of several sets, a set by its weight, then one of its rows; a function of seed and step.

    Args:
        lengths: Rows of each set; they are numbered one set behind the other.
        weights: Of each set, above 0.
        seed: Of what is drawn.
    """

    def __init__(self, lengths: Iterable[int], weights: Iterable[float], *, seed: int) -> None:
        self._lengths, given = np.array(list(lengths)), np.array(list(weights), np.float64)
        self._firsts = np.cumsum([0, *self._lengths[:-1]])
        self._weights, self._seed = given / given.sum(), seed

    def batch(self, step: int, size: int) -> np.ndarray:
        """[size] int64, rows of the global batch of a step, from 0."""
        generator = np.random.default_rng([self._seed, step])
        chosen = generator.choice(len(self._lengths), size, p=self._weights)
        within = (generator.random(size) * self._lengths[chosen]).astype(np.int64)
        return np.asarray(self._firsts[chosen] + within, np.int64)
