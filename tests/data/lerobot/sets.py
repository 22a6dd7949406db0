"""Small recorded sets with two cameras, several tasks, and pictures that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf.data.demonstrations import Demonstration, Demonstrations

SPEC: dict[str, Any] = {
    "observation_shapes": {
        "states": [3], "main_images": [32, 48, 3], "wrist_images": [2, 16, 16, 3], "task_ids": [],
    },
    "observation_dtypes": {
        "states": "float32", "main_images": "uint8", "wrist_images": "uint8", "task_ids": "int64",
    },
    "action_kind": "continuous",
    "action_dim": 2,
    "action_low": [-1.0, -1.0],
    "action_high": [1.0, 1.0],
    "task_descriptions": ["open the window", "close the window"],
    "max_episode_steps": 9,
    "control_rate": 20.0,
}  # fmt: skip


def picture(height: int, width: int, number: int) -> np.ndarray:
    """Smooth colours, so that a video codec keeps them, and others in each frame."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    phase = number / 5
    waves = [np.sin(3 * x + phase), np.sin(2 * y + 2 * phase), np.cos(x + y + phase)]
    return (127 + 100 * np.stack(waves, axis=-1)).astype(np.uint8)


def recorded(lengths: tuple[int, ...] = (9, 4, 7), seed: int = 0) -> Demonstrations:
    """Episodes of alternating tasks; the last one failed."""
    rng = np.random.default_rng(seed)
    episodes, frame = [], 100 * seed
    for number, length in enumerate(lengths):
        frames = range(frame, frame + length)
        frame += length
        episodes.append(
            Demonstration(
                observations={
                    "states": rng.normal(size=(length, 3)).astype(np.float32),
                    "main_images": np.stack([picture(32, 48, n) for n in frames]),
                    "wrist_images": np.stack(
                        [np.stack([picture(16, 16, n), picture(16, 16, n + 40)]) for n in frames]
                    ),
                    "task_ids": np.full(length, number % 2),
                },
                actions=rng.uniform(-1, 1, (length, 2)).astype(np.float32),
                rewards=rng.random(length).astype(np.float32),
                seed=10 * seed + number,
                success=number < len(lengths) - 1,
            )
        )
    return Demonstrations.of(episodes, {"env": {"type": "test"}, "spec": SPEC, "actor": "nobody"})
