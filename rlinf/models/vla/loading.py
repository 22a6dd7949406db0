"""Published weights: files, layouts of names, and strict loading into a model without memory.

Names are translated here, by tables of this project, whatever version of which library wrote them.
Only safetensors are read: no code of a checkpoint is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rlinf.checkpoint.weights import check_finite
from rlinf.checkpoint.weights_file import POLICY_FILE
from rlinf.errors import ConfigError

_SHOWN = 5  # names listed per kind of difference
_INDEX = "model.safetensors.index.json"
_FORMATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""Number formats that are computed with; smaller ones are of quantized weights."""


@dataclass(frozen=True)
class NameLayout:
    """How the names of a published file correspond to those of a graph in this project.

    Args:
        name: What it is called.
        rules: Pairs (theirs, ours) of beginnings of names; ``{}`` stands for one part between dots.
            The first that fits is applied; a name that none fits is unknown.
        tied: Pairs of our names of one tensor. Files may hold either, or both, which are then
            equal; the first is the graph's. Where the second is unused, it is looked at only if
            the first is missing.
        unused: Our names of tensors that files have and no computation reads; one that ends with a
            point stands for all that begin so.
        divided: Endings (theirs, ours) of names: a tensor of theirs has the rows of several of
            ours, one below another and as many of each.
    """

    name: str
    rules: tuple[tuple[str, str], ...]
    tied: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    divided: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def _patterns(self) -> tuple[list[tuple[re.Pattern[str], str]], ...]:
        return (
            [(_pattern(theirs), ours) for theirs, ours in self.rules],
            [(_pattern(ours), theirs) for theirs, ours in self.rules],
        )

    def reads(self, name: str) -> bool:
        """Whether a computation reads a tensor of this name of ours."""
        return not any(
            name.startswith(each) if each.endswith(".") else name == each for each in self.unused
        )

    def ours(self, name: str) -> str | None:
        """The graph's name of a tensor in a file; None where no rule fits."""
        return _renamed(name, self._patterns[0])

    def theirs(self, name: str) -> str | None:
        """The file's name of a tensor of the graph; None where no rule fits."""
        return _renamed(name, self._patterns[1])

    def parts(self, ours: str) -> tuple[str, ...]:
        """Names of the tensors of the graph that one in a file consists of."""
        for whole, parts in self.divided:
            if ours.endswith(whole):
                return tuple(ours.removesuffix(whole) + part for part in parts)
        return (ours,)


def _pattern(template: str) -> re.Pattern[str]:
    parts = (re.escape(part) for part in template.split("{}"))
    return re.compile("([^.]+)".join(parts) + (r"(?=\.|$)" if template else ""))


def _renamed(name: str, patterns: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in patterns:
        if found := pattern.match(name):
            begin = target.format(*found.groups())
            rest = name[found.end() :]
            return begin + rest if begin and rest else begin + rest.removeprefix(".")
    return None


@dataclass(frozen=True)
class Weights:
    """The tensors of one safetensors file or of several shards, by name; read when asked for.

    Args:
        source: The path that was given.
        shapes: Of every tensor.
        files: The file that holds each.
    """

    source: Path
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, "pt")
        found: Tensor = self._open[file].get_tensor(name)
        return found


def open_weights(path: Path) -> Weights:
    """Look into a file, or into the file or shards of a directory, without reading any weight.

    ConfigError where there is none, one is damaged, or a shard or one of its tensors is missing.
    """
    path = path.expanduser()
    index = path / _INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.is_file():
        return _sharded(path, index)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        held = f"neither model.safetensors nor {_INDEX}" if path.is_dir() else "no such file"
        if (path / POLICY_FILE).is_file():
            held += f"; nearest: {path / POLICY_FILE}, or rlinf convert run {path}"
        raise ConfigError(f"{path} holds no published weights: {held}", key="path")
    shapes = _header(file)
    return Weights(path, shapes, dict.fromkeys(shapes, file))


def _sharded(path: Path, index: Path) -> Weights:
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of shards: {error}", key="path") from error
    if gone := [name for name in names if not (index.parent / name).is_file()]:
        raise ConfigError(
            f"{path} is incomplete: {len(gone)} of its {len(names)} files missing: "
            + _listed(gone),
            key="path",
        )
    headers = {name: _header(index.parent / name) for name in names}
    if absent := [name for name, file in where.items() if name not in headers[file]]:
        raise ConfigError(
            f"{path} is incomplete: its files lack {len(absent)} tensors that its index names: "
            + _listed(absent),
            key="path",
        )
    return Weights(
        path,
        {name: headers[file][name] for name, file in where.items()},
        {name: index.parent / file for name, file in where.items()},
    )


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} holds no weights: {error}", key="path") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more


@dataclass(frozen=True)
class Translated:
    """Weights under the names of a graph.

    Args:
        weights: Where they are.
        layout: The layout that was found.
        names: Our name → theirs, of what the graph has; tied names are one.
        unused: The same, of what no computation reads.
        unknown: Names that no rule fits.
        places: Of our names that are a part of a tensor: which one, and of how many.
    """

    weights: Weights
    layout: NameLayout
    names: dict[str, str]
    unused: dict[str, str]
    unknown: tuple[str, ...]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        whole = self.weights[self.names[name]]
        if name not in self.places:
            return whole
        number, count = self.places[name]
        return whole.chunk(count)[number].clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the graph."""
        whole = self.weights.shapes[self.names[name]]
        _, count = self.places.get(name, (0, 1))
        return (whole[0] // count, *whole[1:]) if count > 1 else whole

    def count(self, part: str) -> int:
        """How many numbered parts ``part.N`` the graph has."""
        start = f"{part}."
        names = (name.removeprefix(start) for name in self.names if name.startswith(start))
        return len({name.partition(".")[0] for name in names})


def translate(weights: Weights, layouts: Sequence[NameLayout]) -> Translated:
    """Find the layout that knows most names of a file, and use it.

    ConfigError where none knows any, or tied tensors are stored twice and differ.
    """
    known = {
        layout: sum(layout.ours(name) is not None for name in weights.shapes) for layout in layouts
    }
    layout = max(layouts, key=lambda each: known[each])
    if not known[layout]:
        raise ConfigError(
            f"the weights in {weights.source} are of another model: no layout of "
            f"{', '.join(each.name for each in layouts)} knows a name such as "
            + _listed(list(weights.shapes)),
            key="path",
        )
    pairs = [(layout.ours(name), name) for name in weights.shapes]
    found = {ours: theirs for ours, theirs in pairs if ours is not None}
    for first, second in layout.tied:
        if second not in found or (first in found and not layout.reads(second)):
            continue
        other = found.pop(second)
        if first in found and not torch.equal(weights[found[first]], weights[other]):
            raise ConfigError(
                f"in {weights.source} {found[first]} and {other} differ, which are one tensor of "
                "the model; the file is damaged or of another one",
                key="path",
            )
        found.setdefault(first, other)
    parts = {ours: layout.parts(ours) for ours in found if layout.reads(ours)}
    return Translated(
        weights,
        layout,
        {part: found[ours] for ours, each in parts.items() for part in each},
        {ours: theirs for ours, theirs in found.items() if ours not in parts},
        tuple(theirs for ours, theirs in pairs if ours is None),
        {
            part: (number, len(each))
            for each in parts.values()
            for number, part in enumerate(each)
            if len(each) > 1
        },
    )


def load_published(
    model: nn.Module,
    path: Path,
    layouts: Sequence[NameLayout],
    *,
    dtype: torch.dtype | None = None,
    fresh: Callable[[str], bool] = lambda name: False,
) -> Translated:
    """Give a model, built on the meta device, the weights of a published file, every one of them.

    Args:
        model: Its tensors are replaced; those that are ``fresh`` stay as they are.
        path: A file or directory.
        layouts: Those of this model.
        dtype: What to convert to; None keeps each as it is stored.
        fresh: Names that no published file holds, such as of a critic.

    Raises:
        ConfigError: A tensor is missing, left over or of another shape; all are listed, and
            nothing was read. Or one is of whole numbers or quantized, a file is missing or
            damaged, or tied tensors differ.
    """
    found = translate(open_weights(path), layouts)
    own = {name: tuple(each.shape) for name, each in model.state_dict().items() if not fresh(name)}
    differences = {
        "missing in the file": [name for name in own if name not in found.names],
        "unknown to the model": [
            *(theirs for ours, theirs in found.names.items() if ours not in own),
            *found.unknown,
        ],
        "of another shape": [
            f"{name} ({list(found.shape(name))}, in the model {list(shape)})"
            for name, shape in own.items()
            if name in found.names and found.shape(name) != shape
        ],
    }
    texts = [
        f"{len(names)} {title}: {_listed(names)}" for title, names in differences.items() if names
    ]
    if texts:
        raise ConfigError(
            f"the weights in {path} (layout {found.layout.name}) do not fit; {'; '.join(texts)}",
            key="path",
        )
    read = {name: found[name] for name in own}
    computes = {name: each.is_floating_point() for name, each in model.state_dict().items()}
    foreign = [
        name
        for name, each in read.items()
        if not (each.dtype in _FORMATS if computes[name] else not each.is_floating_point())
    ]
    if foreign:
        raise ConfigError(
            f"the weights in {path} are of other types than the model computes with: "
            f"{_listed([f'{each} ({read[each].dtype})' for each in foreign])}; nearest: those "
            "before they were quantized",
            key="path",
        )
    check_finite(read.items(), source=str(path), key="path")
    model.load_state_dict(
        {name: tensor.to(dtype or tensor.dtype) for name, tensor in read.items()},
        strict=False,
        assign=True,
    )
    vars(model)["published_layout"] = found.layout  # by which it is written back
    return found


def in_one_format(model: nn.Module) -> None:
    """Have a model whose files mix number formats (norms in float32, the rest in bfloat16) compute
    in float32; parameters without memory yet do not count."""
    if len({each.dtype for each in model.parameters() if not each.is_meta}) > 1:
        model.float()
