from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.envs.config import EnvConfig
from tests.packages import write_entry_points


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install the example env as an outside package would, and return a config maker."""
    source = Path(__file__).with_name("example_env.py").read_text()
    (tmp_path / "outside_point.py").write_text(source)
    classes = {"point": "PointEnv", "point_batch": "PointBatch", "point_chunks": "PointChunks"}
    points = {name: f"outside_point:{each}" for name, each in classes.items()}
    write_entry_points(tmp_path, "outside-point", {"rlinf.envs": points})
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(misbehaviour: str = "none", *, one_in: int = 1, at_step: int = 3, **settings):
        options = {"misbehaviour": misbehaviour, "one_in": one_in, "at_step": at_step}
        options.update(settings.pop("options", {}))
        defaults = {
            "type": "point",
            "max_episode_steps": 20,
            "processes": 2,
            "step_deadline": 20.0,
        }
        return EnvConfig(options=options, **{**defaults, **settings})

    return make
