"""Simulators that step a whole batch on a device, and what their adapters share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import Observation, observation_space, require_known
from rlinf.envs.requirements import GPUS, SOURCE_VARIABLE


def to_numpy(tensor: Any) -> np.ndarray:
    """Copy a tensor, which the simulator may write to again, to the host."""
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array.copy()


def row_space(seen: Observation) -> spaces.Dict:
    """Return the space of one row of what a batch shows."""
    return observation_space({key: value.shape[1:] for key, value in seen.items()})


def require_device(device: str) -> None:
    """Refuse a device that is not there; a machine without an NVIDIA GPU needs no torch for that.

    Raises:
        ConfigError: With the nearest legal value.
    """
    if device == "cpu":
        return
    there = ["cpu"]
    if any(Path(GPUS).glob("*")):
        import torch

        there += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    require_known("device", device, there)


def source_on_path() -> str | None:
    """Let packages be found in the folder given as ``--source``, and return it."""
    source = os.environ.get(SOURCE_VARIABLE)
    if source and source not in sys.path:
        sys.path.insert(0, source)
    return source
