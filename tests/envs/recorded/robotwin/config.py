from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def load_task_config(name: str) -> dict[str, Any]:
    text = (Path(__file__).parent / "configs" / "task" / f"{name}.yml").read_text()
    return dict(yaml.safe_load(text))
