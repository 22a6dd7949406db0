"""Fixtures of the original code, and environments for them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.models.config import REGISTRY
from rlinf.models.policy import Policy, draw_noise
from tests.models.test_policies import env_spec

PARITY = Path(__file__).parent / "parity"
ROWS, CHUNK = 6, 4
SPEC = env_spec(
    observation_shapes={"states": (5,), "main_images": (48, 64, 3), "wrist_images": (48, 64, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8", "wrist_images": "uint8"},
    task_descriptions=("close the drawer",),
)
PUBLISHED = env_spec(
    observation_shapes={"states": (5,), "main_images": (32, 48, 3), "wrist_images": (32, 48, 3)},
    observation_dtypes={"states": "float32", "main_images": "uint8", "wrist_images": "uint8"},
    task_descriptions=("close the drawer",),
    action_low=(-4.0,) * 3,
    action_high=(4.0,) * 3,
)
BOTH = ("main_images", "wrist_images")


def tiny(kind: str, seed: int = 0, value_dim: int = 1, **options: Any) -> Any:
    """A policy of random weights."""
    given = {"preset": "tiny", "num_action_chunks": CHUNK, "cameras": BOTH} | options
    return REGISTRY.load(kind)(**given).build(SPEC, value_dim=value_dim, seed=seed)


def published(kind: str, path: Path, spec: Any = PUBLISHED, **options: Any) -> Any:
    """The policy of a directory."""
    given = {"path": path, "cameras": BOTH} | options
    config = REGISTRY.load(kind)(**given)
    config.check()
    return config.build(spec, value_dim=1, seed=0)


def copied(kind: str, to: Path) -> Path:
    """A directory of one's own, to be changed."""
    path = to / kind
    shutil.copytree(PARITY / kind, path)
    return path


def as_before_processors(path: Path) -> Path:
    """A directory as lerobot before 0.4 wrote it: statistics are buffers among the weights."""
    tensors = load_file(path / "model.safetensors")
    (file,) = path.glob("policy_preprocessor_*.safetensors")
    for name, tensor in load_file(file).items():
        feature, _, statistic = name.rpartition(".")
        buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
        kinds = (
            ("normalize_targets", "unnormalize_outputs")
            if feature == "action"
            else ("normalize_inputs",)
        )
        tensors |= {f"{kind}.{buffer}": tensor.clone() for kind in kinds}
    for each in path.glob("policy_*"):
        each.unlink()
    save_file(tensors, path / "model.safetensors")
    return path


def seen(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pictures = {
        name: torch.randint(0, 256, (rows, 48, 64, 3), dtype=torch.uint8, generator=generator)
        for name in BOTH
    }
    return {"states": torch.rand(rows, 5, generator=generator) * 2 - 1, **pictures}


def drawn(policy: Policy, rows: int = ROWS, seed: int = 5) -> dict[str, Tensor]:
    return draw_noise(policy.noise, (rows,), torch.Generator().manual_seed(seed))


def observed(io: dict[str, Tensor]) -> dict[str, Tensor]:
    """Observations of a fixture."""
    return {"states": io["states"], "main_images": io["front"], "wrist_images": io["wrist"]}


def checksum(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Of names and shapes."""
    lines = sorted(f"{name} {list(shape)}" for name, shape in shapes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
