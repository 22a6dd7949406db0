"""Files of normalisation statistics, as vision-language-action models publish them.

Four layouts are read:

========= ============================================================ =========================
layout    file                                                         its keys
========= ============================================================ =========================
openpi    ``assets/ID/norm_stats.json``; of RLinf                      the ids
          ``ID/norm_stats.json``
openvla   ``dataset_statistics.json``, over ``norm_stats`` of          the data sets
          ``config.json``
lerobot   ``meta/stats.json``; of a model                              none
          ``…_normalizer_processor.safetensors``, of GR00T
          ``…_groot_pack_inputs_v3.safetensors``, or before
          lerobot 0.4 buffers in ``model.safetensors``
groot     ``experiment_cfg/metadata.json``                             the embodiments
========= ============================================================ =========================

and what a run wrote into the header of its ``policy.safetensors``. Those of JSON are read without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rlinf.checkpoint.weights_file import STATISTICS, read_header
from rlinf.config.nearest import did_you_mean
from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError
from rlinf.models.vla.statistics_needs import NEEDS, require_numbers

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf.models.vla.statistics import Method, ModelStatistics

BUFFERS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
"""What names of statistics among the weights of lerobot before 0.4 begin with."""
NORMALISERS = tuple((name.removesuffix("."),) * 2 for name in BUFFERS)
"""Rules for these, of a :class:`~rlinf.models.vla.loading.NameLayout`."""
_PROCESSORS = ("normalizer_processor", "groot_pack_inputs_v3")
"""How lerobot's processors that hold statistics are called."""
_MOST_PARTS = 3
"""Of an id that is looked for beside weights, where a directory may hold much else."""
_FILES = (
    "norm_stats.json",
    "dataset_statistics.json",
    "meta/stats.json",
    "experiment_cfg/metadata.json",
)


def read_statistics(
    path: Path,
    key: str | None = None,
    *,
    action_parts: Sequence[str] | None = None,
    state_parts: Sequence[str] | None = None,
) -> ModelStatistics:
    """Statistics of a published directory, or of one of its files.

    Args:
        path: Directory of a model or set, or the file itself.
        key: Which of several sets of statistics; None where there is one.
        action_parts: Which of the named parts that GR00T has make up an action, in this order;
            None: all, in the order of the file.
        state_parts: The same of a state.

    Raises:
        ConfigError: There are none, none of this key, or several and no key; or no such part.
    """
    from rlinf.models.vla.statistics import ModelStatistics, Statistics

    path = path.expanduser()
    key, values = _chosen(path, key, _sets(path))
    with _readable(path, key):
        actions, states = _vectors(values, action_parts, state_parts)
        pictures = {
            name.replace(".", "_"): Statistics.of(each)
            for name, each in values.items()
            if name.startswith(("observation.image", "observation_image")) and "mean" in each
        }
        of_states = None if states is None else Statistics.of(states)
        return ModelStatistics(Statistics.of(actions), of_states, key, pictures)


def require_actions(
    path: Path,
    method: Method | None,
    key: str | None = None,
    *,
    action_parts: Sequence[str] | None = None,
    state_parts: Sequence[str] | None = None,
) -> None:
    """Refuse a file of JSON, or those of a published directory, without statistics of the key, or
    whose statistics of actions lack what a method computes with, without torch; the arguments are
    those of :func:`read_statistics`. A directory without such files has tensors, or none.

    Raises:
        ConfigError: As when it is read; of ``statistics`` where something is lacking.
    """
    path = path.expanduser()
    sets = _written_sets(path) if path.is_dir() else _sets(path)
    if not sets and path.is_dir():
        return
    key, values = _chosen(path, key, sets)
    with _readable(path, key), np.errstate(over="ignore"):
        actions, _ = _vectors(values, action_parts, state_parts)
        numbers = {name: np.asarray(actions[name], np.float32).reshape(-1)
                   for pair in NEEDS.values() for name in pair
                   if actions.get(name) is not None}  # fmt: skip
        if method is not None:
            require_numbers(numbers, method, of="actions")


def _chosen(
    path: Path, key: str | None, sets: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """The set of statistics of a key, and the key."""
    if not sets:
        raise ConfigError(
            f"{path} has no statistics; known files: "
            f"{', '.join(_FILES)}, assets/ID/norm_stats.json, ID/norm_stats.json, config.json with "
            f"norm_stats, {', '.join(f'*_{each}.safetensors' for each in _PROCESSORS)}",
            key="statistics",
        )
    if key is None and len(sets) > 1:
        raise ConfigError(
            f"{path} has statistics of {len(sets)} data sets; nearest: one of "
            f"{', '.join(sorted(sets))}",
            key="statistics_key",
        )
    if key is None:
        (key,) = sets
    elif list(sets) == [""]:
        raise ConfigError(
            f"{path} has one set of statistics, without a key to choose it by; nearest: leave "
            f"`{key}` out",
            key="statistics_key",
        )
    elif key not in sets:
        raise ConfigError(
            f"{path} has no statistics of `{key}`; {did_you_mean(key, sets)}", key="statistics_key"
        )
    return key, sets[key]


@contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    """ConfigError where what a file holds is not of the form of statistics."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        of = f" of `{key}`" if key else ""
        raise ConfigError(f"{path}: the statistics{of} cannot be read: {error}") from error


def _sets(path: Path) -> dict[str, Mapping[str, Any]]:
    """All sets of statistics, by key."""
    if path.is_file():
        if path.suffix != ".safetensors":
            return _keyed(read_settings(path))
        written = read_header(path).get(STATISTICS)
        found = _buffers(path) or _tensors(path) if written is None else json.loads(written)
        return _keyed(found)
    sets: dict[str, Mapping[str, Any]] = {}
    for file in sorted(f for each in _PROCESSORS for f in path.glob(f"*_{each}.safetensors")):
        sets |= _keyed(_tensors(file))
    if not sets and (path / "model.safetensors").is_file():
        sets |= _keyed(_buffers(path / "model.safetensors"))
    return sets | _written_sets(path)


def _written_sets(path: Path) -> dict[str, Mapping[str, Any]]:
    """Those in files of JSON of a directory."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in ("config.json", *_FILES):  # a data set of its own goes before the model's
        if (path / name).is_file():
            content = read_settings(path / name)
            if name != "config.json" or "norm_stats" in content:
                found |= _keyed(content)
    for file, place in _openpi_files(path):
        each = _keyed(read_settings(file))
        found |= {f"{place}/{key}" if key else place: values for key, values in each.items()}
    return found


def _openpi_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Files of openpi's statistics below a directory, and their ids, which may have parts, as
    physical-intelligence/libero: RLinf has them beside the weights, openpi below `assets`."""
    assets = path / "assets"
    for parts in range(1, _MOST_PARTS + 1):
        for file in sorted(path.glob("*/" * parts + "norm_stats.json")):
            if not file.is_relative_to(assets):
                yield file, str(file.parent.relative_to(path))
    for file in sorted(assets.rglob("norm_stats.json")):
        yield file, str(file.parent.relative_to(assets))


def _tensors(path: Path) -> Mapping[str, Any]:
    """What lerobot saves with a model: ``action.mean`` and the like."""
    from safetensors.torch import load_file

    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return _by_feature(stored)


def _buffers(path: Path) -> Mapping[str, Any]:
    """What lerobot before 0.4 had among the weights: ``normalize_inputs.buffer_observation_state.
    mean`` and the like."""
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(BUFFERS)]  # noqa: SIM118 - not a mapping
            stored = {name.partition(".buffer_")[2]: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError):
        return {}  # who loads the weights says so
    return _by_feature(stored)


def _by_feature(stored: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in stored.items():
        feature, _, statistic = name.rpartition(".")
        found.setdefault(feature, {})[statistic] = tensor
    return found


def _keyed(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    content = content.get("norm_stats", content)
    if not isinstance(content, dict):
        return {}
    if "action" in content or "actions" in content:
        return {"": content}
    sets = {
        name: each.get("statistics", each)
        for name, each in content.items()
        if isinstance(each, dict)
    }
    return {
        name: each
        for name, each in sets.items()
        if isinstance(each, dict) and {"action", "actions"} & each.keys()
    }


def _vectors(
    values: Mapping[str, Any],
    action_parts: Sequence[str] | None,
    state_parts: Sequence[str] | None,
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """What a set says of actions and of states, as it is written."""

    def vector(parts: Sequence[str] | None, of: str, *names: str) -> Mapping[str, Any] | None:
        for name in names:
            if values.get(name):
                return _joined(values[name], parts, of)
        return None

    actions = vector(action_parts, "action", "action", "actions")
    if actions is None:
        raise ValueError("nothing is said of actions")
    states = ("state", "states", "observation.state", "observation_state", "proprio")
    return actions, vector(state_parts, "state", *states)


def _joined(values: Mapping[str, Any], wanted: Sequence[str] | None, of: str) -> Mapping[str, Any]:
    """One vector of the named parts that GR00T has."""
    parts = {name: part for name, part in values.items() if isinstance(part, dict)}
    for name in wanted or ():
        if name not in parts:
            hint = did_you_mean(name, parts) if parts else f"nearest: leave {of}_parts out"
            raise ConfigError(
                f"the statistics have no part `{name}` of the {of}; {hint}", key=f"{of}_parts"
            )
    chosen = [parts[name] for name in wanted or parts]
    if not chosen:
        return values
    names = [name for name in chosen[0] if all(name in part for part in chosen)]
    return {name: [number for part in chosen for number in part[name]] for name in names}
