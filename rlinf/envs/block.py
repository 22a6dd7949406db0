"""The shared memory of one vector env: one row per env, mapped by every env process."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from rlinf.envs.records import RECORD_DTYPE
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError

_ALIGNMENT = 64
_SHARED_DIRECTORY = "/dev/shm"

Fields = dict[str, tuple[tuple[int, ...], np.dtype]]


class Status:
    """What an env is doing, as written in its ``status`` cell."""

    IDLE = 0
    RUNNING = 1
    ENDED = 2
    EXHAUSTED = 3


# Everything that a checkpoint must hold besides observations, action log and simulator state.
EPISODE_FIELDS: dict[str, str] = {
    "epoch": "<i8",  # explicit resets so far, minus one
    "index": "<i8",  # episodes since the last explicit reset
    "serial": "<i8",  # episodes since the beginning
    "attempt": "<i8",  # repeats of a listed episode after a fault
    "status": "<i8",
    "episode_id": "<i8",
    "seed": "<i8",
    "steps": "<i8",
    "episode_return": "<f8",
    "success_once": "?",
    "success_now": "?",
    "fail_once": "?",
}


def block_fields(spec: EnvSpec, num_envs: int, max_chunk: int, processes: int) -> Fields:
    """Return name, shape and type of every array of the block."""
    per_env = {
        **{name: ((), kind) for name, kind in EPISODE_FIELDS.items()},
        "done_sequence": ((), "<i8"),  # the last command that this row has completed
        "acted_episode": ((), "<i8"),
        "acted_seed": ((), "<i8"),
        "terminated": ((), "?"),
        "truncated": ((), "?"),
        "final": ((), "?"),
        "valid": ((), "?"),
        "active": ((), "?"),
        "recorded": ((), "?"),
        "rewards": ((max_chunk,), "<f4"),
        "actions": ((max_chunk, spec.action_dim), "<f4"),
        "log": ((spec.max_episode_steps, spec.action_dim), "<f4"),
    }
    fields: Fields = {
        name: ((num_envs, *shape), np.dtype(kind)) for name, (shape, kind) in per_env.items()
    }
    fields["records"] = ((num_envs,), RECORD_DTYPE)
    for key, shape in spec.observation_shapes.items():
        dtype = np.dtype(spec.observation_dtypes[key])
        fields[f"observation/{key}"] = ((num_envs, *shape), dtype)
        fields[f"final/{key}"] = ((num_envs, *shape), dtype)
    # Per process: the row being stepped (-1: none) and a count that grows with every step.
    fields["progress"] = ((processes, _ALIGNMENT // 8), np.dtype("<i8"))
    return fields


def block_size(fields: Fields) -> int:
    """Return the bytes that the fields take."""
    return sum(_padded(shape, dtype) for shape, dtype in fields.values())


def _padded(shape: tuple[int, ...], dtype: np.dtype) -> int:
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def open_descriptor() -> int:
    """Return a descriptor of nameless shared memory: nothing is left behind by ``kill -9``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlinf-envs")
    directory = _SHARED_DIRECTORY if os.path.isdir(_SHARED_DIRECTORY) else None
    descriptor, path = tempfile.mkstemp(prefix="rlinf-envs-", dir=directory)
    os.unlink(path)
    return descriptor


def size_descriptor(descriptor: int, size: int) -> None:
    """Give the shared memory its size.

    Raises:
        ConfigError: The machine does not have that much.
    """
    available = _available_bytes(descriptor)
    if available is not None and size > available:
        raise ConfigError(
            f"the envs need {size / 2**20:.0f} MiB of shared memory and {available / 2**20:.0f} "
            "MiB are available; use fewer envs, smaller images, or allow more "
            "(docker run --shm-size=...)"
        )
    os.ftruncate(descriptor, size)


def _available_bytes(descriptor: int) -> int | None:
    if not hasattr(os, "memfd_create"):
        state = os.fstatvfs(descriptor)
        return state.f_bavail * state.f_frsize
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


class SharedBlock:
    """The arrays of the block, by name, over one mapping."""

    def __init__(self, descriptor: int, fields: Fields) -> None:
        self._memory = mmap.mmap(descriptor, block_size(fields))
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, (shape, dtype) in fields.items():
            count = int(np.prod(shape, dtype=np.int64))
            flat = np.frombuffer(self._memory, dtype, count, offset)
            self.arrays[name] = flat.reshape(shape)
            offset += _padded(shape, dtype)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays named ``prefix/key``, by key."""
        start = f"{prefix}/"
        return {
            name.removeprefix(start): array
            for name, array in self.arrays.items()
            if name.startswith(start)
        }
