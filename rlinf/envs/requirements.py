"""What a simulator needs to be installed, said by its adapter as data.

Part of the env side: the standard library alone, under any interpreter from 3.8 on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

SOURCE_VARIABLE = "RLINF_SIMULATOR_SOURCE"
"""Tells an adapter where the folder given as ``--source`` is."""

GPUS = "/proc/driver/nvidia/gpus"
"""Where the driver names its devices, which is read in an instant."""


def source_folder() -> Path:
    """Return the folder given as ``--source``, by default the present one."""
    return Path(os.environ.get(SOURCE_VARIABLE, "."))


@dataclass(frozen=True)
class Requirements:
    """How the virtual environment of a simulator is made, how large it is, and its licence."""

    packages: tuple[str, ...]
    """Exact pins of what is asked for: ``metaworld==3.1.1``. What these bring is pinned by the
    lock file beside them."""

    module: str
    """Import name by which one sees that the simulator is installed."""

    overrides: tuple[str, ...] = ()
    """Exact pins that hold against what one of the packages asks for; with ``; sys_platform ==
    'never'`` behind it a package is left out."""

    python: str = "3.11"
    """Version of the interpreter."""

    download_mb: int = 0
    """Megabytes to download when nothing is cached."""

    disk_mb: int = 0
    """Megabytes of the finished virtual environment."""

    licence: str = ""
    """Licence of the simulator, and of its assets where that is another."""

    libraries: dict[str, str] = field(default_factory=dict)
    """Shared libraries that must be on the machine, and the Debian package that has each."""

    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the env processes. ``MUJOCO_GL`` is replaced by ``osmesa`` where
    EGL does not draw, and by what the user has chosen."""

    extra: str = ""
    """Extra of this project that puts the simulator beside the trainer, where both get along."""

    source: str | None = None
    """For a simulator without a package: what the folder given as ``--source`` must be."""

    source_folders: tuple[str, ...] = ()
    """Folders in it, by which one sees that it is."""

    assets: str = ""
    """What must be fetched after the packages, and how."""

    accelerator: bool = False
    """Whether it runs on an NVIDIA GPU alone."""

    def __post_init__(self) -> None:
        loose = [package for package in self.packages + self.overrides if "==" not in package]
        if loose:
            raise ValueError(f"not pinned exactly: {', '.join(loose)}")
