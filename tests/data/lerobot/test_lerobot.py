"""lerobot itself opens what is written, and what it writes is read: both see the same frames.

Needs the interpreter of an environment with lerobot 0.6.1 in RLINF_LEROBOT_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlinf.data.imitation import Recorded
from rlinf.data.lerobot.reader import LeRobotSet
from rlinf.data.lerobot.writer import write_lerobot

from .sets import picture, recorded

pytest.importorskip("pyarrow")
pytest.importorskip("av")
PYTHON = os.environ.get("RLINF_LEROBOT_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RLINF_LEROBOT_PYTHON names no Python with lerobot"),
]

OPEN = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

for kind in ("image", "video"):
    found = LeRobotDataset("local/set", root=f"{sys.argv[1]}/{kind}", video_backend="pyav",
                           delta_timestamps={"action": [0.0, 0.05, 0.1]})
    rows = [found[number] for number in range(len(found))]
    np.savez(
        f"{sys.argv[1]}/{kind}.npz",
        main=np.stack([row["observation.images.main"].numpy() for row in rows]),
        wrist=np.stack([row["observation.images.wrist_1"].numpy() for row in rows]),
        state=np.stack([row["observation.state"].numpy() for row in rows]),
        action=np.stack([row["action"].numpy() for row in rows]),
        pad=np.stack([row["action_is_pad"].numpy() for row in rows]),
        task=np.array([row["task"] for row in rows]),
        mean=found.meta.stats["action"]["mean"],
        pictured=found.meta.stats["observation.images.main"]["mean"],
        fps=found.meta.fps,
    )
"""

WRITE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

given = np.load(f"{sys.argv[1]}/given.npz")
names = ["height", "width", "channels"]
for kind in ("image", "video"):
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "observation.images.front": {"dtype": kind, "shape": (32, 48, 3), "names": names},
    }
    made = LeRobotDataset.create("local/set", fps=20, features=features,
                                 root=f"{sys.argv[1]}/{kind}", use_videos=kind == "video")
    for episode in range(3):
        for frame in range(6 * episode, 6 * episode + 6):
            made.add_frame({
                "observation.state": given["state"][frame], "action": given["action"][frame],
                "observation.images.front": given["front"][frame], "task": f"task {episode % 2}",
            })
        made.save_episode()
    made.finalize()
"""


def lerobot(program: str, directory: Path) -> None:
    """Run a program of lerobot's."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", program, str(directory)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_lerobot_opens_what_is_written(tmp_path: Path) -> None:
    whole = recorded()
    for kind in ("image", "video"):
        write_lerobot(whole, tmp_path / kind, fps=20, pictures=kind)  # type: ignore[arg-type]
    lerobot(OPEN, tmp_path)
    for kind in ("image", "video"):
        found, theirs = LeRobotSet(tmp_path / kind), np.load(tmp_path / f"{kind}.npz")
        for name, feature in (("main", "main"), ("wrist", "wrist_1")):
            own = found.pictures(f"observation.images.{feature}")[np.arange(len(found))]
            seen = np.round(theirs[name] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
            # Both decode the same bytes; versions of the decoder may round otherwise.
            assert np.abs(seen.astype(int) - own).max() <= (0 if kind == "image" else 2)
        np.testing.assert_array_equal(theirs["state"], whole.observations["states"])
        steps, acted = Recorded.of(whole).chunks(3)
        np.testing.assert_array_equal(theirs["action"], whole.actions[steps])
        np.testing.assert_array_equal(~theirs["pad"], acted)
        texts = [each.text for each in found.episodes for _ in range(each.length)]
        assert theirs["task"].tolist() == texts
        np.testing.assert_allclose(theirs["mean"], whole.actions.mean(0), atol=1e-6)
        assert theirs["pictured"].shape == (3, 1, 1)
        assert theirs["fps"] == 20


def test_what_lerobot_writes_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = {
        "state": rng.normal(size=(18, 3)).astype(np.float32),
        "action": rng.normal(size=(18, 2)).astype(np.float32),
        "front": np.stack([picture(32, 48, number) for number in range(18)]),
    }
    np.savez(tmp_path / "given.npz", **given)
    lerobot(WRITE, tmp_path)
    for kind in ("image", "video"):
        found = LeRobotSet(tmp_path / kind)
        found.check_videos(["observation.images.front"])
        assert [each.length for each in found.episodes] == [6, 6, 6]
        assert [each.text for each in found.episodes] == ["task 0", "task 1", "task 0"]
        np.testing.assert_array_equal(found.vectors("observation.state"), given["state"])
        np.testing.assert_array_equal(found.vectors("action"), given["action"])
        rows = rng.permutation(18)
        error = np.abs(
            found.pictures("observation.images.front")[rows].astype(int) - given["front"][rows]
        )
        assert error.mean() == 0 if kind == "image" else error.mean() < 8
