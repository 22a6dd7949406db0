"""Published weights under the names that another program reads, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlinf.checkpoint.weights import save_tensors
from rlinf.checkpoint.weights_file import MODEL, read_header
from rlinf.errors import ConfigError
from rlinf.models.vla.loading import NameLayout, Translated, open_weights, translate
from rlinf.models.vla.pi0.layouts import EMBEDDING, OF_PI05, PI0_ALONE
from rlinf.models.vla.pi0.layouts import LAYOUTS as PI0_LAYOUTS
from rlinf.models.vla.smolvla.policy import LAYOUTS as SMOLVLA_LAYOUTS
from rlinf.models.vla.statistics_files import BUFFERS

_ACTIONS = "action_in_proj.weight"  # [width of the expert, action dimensions]


@dataclass(frozen=True)
class Family:
    """Models whose files are converted into each other's layouts.

    Args:
        title: Of the models, as said to a user.
        types: What files of runs call them.
        layouts: Their names in files.
        unused_width: Columns of the output head that files store and no computation reads; its
            rows are those of the vocabulary.
    """

    title: str
    types: tuple[str, ...]
    layouts: tuple[NameLayout, ...]
    unused_width: Callable[[Translated], int]

    def layout(self, name: str) -> NameLayout:
        """One by its name."""
        for each in self.layouts:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in self.layouts)
        raise ConfigError(f"--to = '{name}' is no layout of {self.title}; legal: {names}")


# Files of runs name the parts of both alike, but a projector of SmolVLA has no bias: where layouts
# know equally many names of a file, it is of the first.
FAMILIES = (
    Family("SmolVLA", ("smolvla",), SMOLVLA_LAYOUTS, lambda found: found.shape(EMBEDDING)[1]),
    Family("π₀ and π₀.₅", ("pi0", "pi05"), PI0_LAYOUTS, lambda found: found.shape(_ACTIONS)[0]),
)


def convert(source: Path, target: str) -> tuple[Translated, dict[str, Tensor]]:
    """The weights in ``source`` under the names of the layout ``target``.

    An output head that published files hold and nothing reads is written as zeros where the source
    has none.

    Raises:
        ConfigError: No layout knows the file, it is not whole, or its model has no such layout.
    """
    written = read_header(source).get(MODEL)
    if written is not None and not any(written in each.types for each in FAMILIES):
        raise ConfigError(
            f"{source} is of a model of type {written}; layouts are known of "
            f"{' and of '.join(each.title for each in FAMILIES)} alone; nearest: rlinf convert run "
            "RUN, which writes the format of the directory that a run began with",
            key="path",
        )
    found = translate(open_weights(source), [one for each in FAMILIES for one in each.layouts])
    family = next(each for each in FAMILIES if found.layout in each.layouts)
    for needed in (EMBEDDING, _ACTIONS):
        if needed not in found.names:
            raise ConfigError(
                f"{source} holds no whole {' or '.join(each.title for each in FAMILIES)}: there is "
                f"no {needed}; the file of a run has what was trained alone; nearest: rlinf "
                "convert run RUN where the run began with model.path, and a run that trains every "
                "weight where it began with a preset",
                key="path",
            )
    layout = family.layout(target)
    if OF_PI05 in found.names and target in PI0_ALONE:
        names = ", ".join(each.name for each in family.layouts if each.name not in PI0_ALONE)
        raise ConfigError(
            f"--to = '{target}' is a layout of a program that has no π₀.₅, which {source} holds; "
            f"legal: {names}"
        )

    def fill(name: str) -> Tensor:
        rows, columns = found.shape(EMBEDDING)[0], family.unused_width(found)
        return torch.zeros(rows, columns, dtype=found[_ACTIONS].dtype)

    return found, dict(_converted(found, layout, fill))


def left_statistics(found: Translated, tensors: Mapping[str, Tensor]) -> int:
    """How many tensors of statistics, which lerobot before 0.4 had among the weights, are not in
    what a file was converted to."""
    names = [name for ours, name in found.unused.items() if ours.startswith(BUFFERS)]
    return sum(name not in tensors for name in names)


def _converted(
    found: Translated, target: NameLayout, fill: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a published file under the names of another layout, bit for bit.

    Those that only the target stores, of its unused ones, are what ``fill`` gives for our name.
    """
    stored = {first: second for first, second in target.tied if target.theirs(second) is not None}
    kept = {ours: theirs for ours, theirs in found.unused.items() if not target.reads(ours)}
    for ours, theirs in {**found.names, **kept}.items():
        name = target.theirs(stored.get(ours, ours))
        if name is not None:
            yield name, found.weights[theirs]
    for ours in (each for each in target.unused if not each.endswith(".")):
        name = target.theirs(ours)
        if ours not in found.unused and name is not None:
            yield name, fill(ours)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; a crash leaves the former one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        save_tensors({name: each.contiguous() for name, each in tensors.items()}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
