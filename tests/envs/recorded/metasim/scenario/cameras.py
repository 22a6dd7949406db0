"""Stand-in: a camera that stands, or is mounted on a link."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PinholeCameraCfg:
    name: str = "camera0"
    data_types: list = field(default_factory=lambda: ["rgb", "depth"])
    width: int = 1980
    height: int = 1080
    pos: tuple = (0.0, 0.0, 1.0)
    look_at: tuple = (0.0, 0.0, 0.0)
    mount_to: Any = None
    mount_link: Any = None
    mount_pos: Any = None
    mount_quat: Any = None
    focal_length: float = 24.0
    horizontal_aperture: float = 20.955
