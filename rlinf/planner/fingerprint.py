"""What a profile is valid for: fingerprints of machine, model and recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlinf.planner.overhead import Overhead
from rlinf.planner.profile import ComponentProfile, Profile


@dataclass(frozen=True)
class Fingerprints:
    """What a profile is valid for, as text that is compared whole and can be read."""

    hardware: str
    model: str
    config: str

    def profile(
        self, components: Mapping[str, ComponentProfile], overhead: Overhead | None = None
    ) -> Profile:
        """A profile of these components, and of what steps take beside their work."""
        beside = overhead or Overhead()
        return Profile(
            hardware=self.hardware,
            model=self.model,
            config=self.config,
            **{name: getattr(beside, name) for name in Overhead.model_fields},
            components=components,
        )

    def differences(self, profile: Profile) -> tuple[str, ...]:
        """Say what a profile was measured on that is different here; empty where nothing is."""
        return profile.differences(hardware=self.hardware, model=self.model, config=self.config)


def hardware_fingerprint(devices: int, packages: Iterable[str]) -> str:
    """The machine: processor, cores, memory, devices, and versions of what computes on it.

    Args:
        devices: Devices that a plan divides: CPU slots or accelerators.
        packages: Distributions whose version matters, beside torch; one that is not installed is
            left out.
    """
    memory = round(psutil.virtual_memory().total / 2**30)
    cores = len(psutil.Process().cpu_affinity())
    parts = [
        _processor(),
        f"{cores} cores",
        f"{memory} GiB",
        f"{devices} devices",
        *_accelerators(),
    ]
    for package in ("torch", *packages):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _accelerators() -> list[str]:
    """Names of the NVIDIA devices by the driver's files; asking torch would take seconds."""
    found: dict[str, int] = {}
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                name = line.partition(":")[2].strip()
                found[name] = found.get(name, 0) + 1
    return [f"{count}x {name}" for name, count in found.items()]


def hashed(data: Any) -> str:
    """Twelve hex digits for plain data: equal data, equal digits."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
