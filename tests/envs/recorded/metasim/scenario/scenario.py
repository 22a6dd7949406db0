"""Stand-in: a scene, its robots and its cameras."""

from dataclasses import dataclass, field
from typing import Any

from metasim.scenario.robot import RobotCfg


@dataclass
class ScenarioCfg:
    robots: list = field(default_factory=list)
    objects: list = field(default_factory=list)
    cameras: list = field(default_factory=list)
    simulator: Any = None
    num_envs: int = 1
    headless: bool = False
    env_spacing: float = 1.0

    def __post_init__(self):
        self.robots = [RobotCfg() if robot == "franka" else robot for robot in self.robots]

    def update(self, **kwargs):
        for key, value in kwargs.items():
            if key not in self.__dict__:
                raise AttributeError(key)
            setattr(self, key, value)
        self.__post_init__()
        return self
