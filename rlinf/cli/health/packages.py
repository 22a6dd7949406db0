"""Versions of Python and of the packages, read from their metadata without importing them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from rlinf.cli.health.finding import Finding

REQUIRED = (
    "torch",
    "numpy",
    "gymnasium",
    "pydantic",
    "omegaconf",
    "typer",
    "rich",
    "safetensors",
    "cloudpickle",
    "psutil",
    "tensorboard",
    "matplotlib",
    "imageio",
    "imageio-ffmpeg",
)

# Distribution and the extra that installs it.
OPTIONAL = {
    "ray": "ray",
    "metaworld": "metaworld",
    "mujoco": "metaworld",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow-skinny": "mlflow",
}

_OLDEST_PYTHON = (3, 11)


def package_findings() -> Iterator[Finding]:
    """Yield the versions of Python, of every required and of every optional package."""
    good = sys.version_info >= _OLDEST_PYTHON
    yield Finding(
        "python",
        "ok" if good else "failed",
        f"{platform.python_version()} ({sys.executable})",
        "" if good else "uv venv --python 3.11",
    )
    for name in REQUIRED:
        version = _version(name)
        if version:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "failed", "not installed", f"pip install {name}")
    for name, extra in OPTIONAL.items():
        version = _version(name)
        if version:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "absent", "optional", f"pip install 'rlinf[{extra}]'")


def installed(name: str) -> bool:
    """Whether a distribution is installed."""
    return bool(_version(name))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
