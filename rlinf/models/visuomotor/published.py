"""Directories as lerobot publishes them: what their ``config.json`` says of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.data.json_files import read_settings
from rlinf.errors import ConfigError
from rlinf.models.vla.config import normalisation
from rlinf.models.vla.loading import Translated
from rlinf.models.vla.statistics import Method


@dataclass(frozen=True)
class VisuomotorFiles:
    """What a directory says.

    Args:
        path: The directory.
        settings: Its ``config.json``.
        pictures: Height and width of what the model sees, by feature, in its order.
        state_dim: D; 0: it reads no states.
        action_dim: A'.
        colours: How pictures are normalised; None: they are not.
    """

    path: Path
    settings: Mapping[str, Any]
    pictures: Mapping[str, tuple[int, int]]
    state_dim: int
    action_dim: int
    colours: Method | None

    def setting(self, name: str, legal: tuple[Any, ...]) -> Any:
        """A setting, which is the first of ``legal`` where none is given; ConfigError where another
        one is, which would have something computed that is not known here."""
        value = self.settings.get(name, legal[0])
        if value not in legal:
            nearest = " or ".join(str(each) for each in legal)
            raise ConfigError(
                f"{self.path} has {name}: {value} in its config.json, which is not computed here; "
                f"nearest: a model with {nearest}",
                key="path",
            )
        return value


def read_directory(path: Path) -> VisuomotorFiles:
    """Read ``config.json``; ConfigError, where it describes no model of pictures and states."""
    path = path.expanduser()
    settings = read_settings(path / "config.json", key="path")
    try:
        seen, given = settings["input_features"], settings["output_features"]
        shapes = {name: (each["type"], tuple(each["shape"])) for name, each in seen.items()}
        (action_dim,) = given["action"]["shape"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no config.json that describes input_features and output_features as "
            f"lerobot does: {error!r}",
            key="path",
        ) from error
    others = [
        name for name, (kind, _) in shapes.items()
        if kind != "VISUAL" and (kind, name) != ("STATE", "observation.state")
    ]  # fmt: skip
    if others:
        raise ConfigError(
            f"{path} reads {others[0]}, which no environment gives; nearest: a model that reads "
            "pictures and observation.state alone",
            key="path",
        )
    pictures = {name: shape[1:] for name, (kind, shape) in shapes.items() if kind == "VISUAL"}
    if not pictures:
        raise ConfigError(f"{path} sees no pictures; nearest: a model that does", key="path")
    _, states = shapes.get("observation.state", ("STATE", (0,)))
    colours = normalisation(settings, path).get("VISUAL", "mean_std")
    return VisuomotorFiles(path, settings, pictures, states[0], action_dim, colours)


def stages_of(found: Translated, part: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks and channels of each stage of a ResNet among weights; ConfigError where it has none,
    or blocks of three convolutions."""
    blocks: list[int] = []
    channels: list[int] = []
    while f"{part}layer{len(blocks) + 1}.0.conv2.weight" in found.names:
        stage = f"{part}layer{len(blocks) + 1}"
        blocks.append(found.count(stage))
        channels.append(found.shape(f"{stage}.0.conv2.weight")[0])
    if not blocks or f"{part}layer1.0.conv3.weight" in found.names:
        raise ConfigError(
            "the directory has no ResNet of basic blocks; nearest: a model with vision_backbone "
            "resnet18 or resnet34",
            key="path",
        )
    return tuple(blocks), tuple(channels)
