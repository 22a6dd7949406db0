"""A toy of an R1 Pro robot behind the interface of OmniGibson's VectorEnvironment.

Its oddities are the real one's: lists in and out, tensors of PyTorch, nested observations whose
pictures have four channels, success deep in ``info``, seeds that do not exist, a reset of one
scene that steps the physics of all, and a configuration that must name its robots.
"""

from __future__ import annotations

import copy
from typing import Any

import torch as th

SIZES = {"zed": 720, "left_realsense": 480, "right_realsense": 480}


class Environment:
    def __init__(self, configs: dict[str, Any], in_vec_env: bool = False) -> None:
        (robot,) = configs["robots"]
        assert "name" in robot, "Robot at index 0 must specify a name for vector environment!"
        self.robot, self.task = robot, configs["task"]
        assert not configs["env"]["automatic_reset"]
        self.physics_steps = 0
        self._restart()

    def _restart(self) -> None:
        self.target = th.zeros(23)
        self.opened, self.steps = 0.0, 0

    def _physics(self) -> None:
        self.physics_steps += 1

    def get_obs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        proprio = th.zeros(256)
        proprio[:23] = self.target
        proprio[255] = self.opened
        found: dict[str, Any] = {"proprio": proprio}
        if "rgb" in self.robot["obs_modalities"]:
            name = self.robot["name"]
            for place, (camera, size) in enumerate(SIZES.items()):
                picture = th.full((size, size, 4), 90 + 10 * place, dtype=th.uint8)
                picture[..., 3] = 255
                found[f"{name}:{camera}_link:Camera:0"] = {"rgb": picture}
        return {self.robot["name"]: found}, {}

    def reset(self, get_obs: bool = True, **kwargs: Any) -> Any:
        self._restart()
        for env in self.scenes:
            env._physics()  # one simulator steps every scene
        return self.get_obs() if get_obs else None

    def _pre_step(self, action: Any) -> None:
        assert isinstance(action, th.Tensor)
        assert action.shape == (23,)
        assert action.dtype == th.float32
        self.target = action.clone()

    def _post_step(self, action: Any) -> tuple[Any, ...]:
        before, self.opened = self.opened, self.opened + 0.2 * float(action[14] > 0.5)
        self.steps += 1
        success = self.opened >= 0.99
        late = self.steps >= self.task["termination_config"]["max_steps"]
        conditions = {
            "predicate": {"done": success, "success": success},
            "timeout": {"done": late, "success": False},
        }
        info = {
            "done": {"termination_conditions": conditions, "success": success},
            "reward": {"reward_breakdown": {"potential": self.opened - before}},
        }
        return self.get_obs()[0], self.opened - before, success, late, info


class VectorEnvironment:
    def __init__(self, num_envs: int, config: dict[str, Any]) -> None:
        self.num_envs = num_envs
        self.envs = [
            Environment(configs=copy.deepcopy(config), in_vec_env=True) for _ in range(num_envs)
        ]
        for env in self.envs:
            env.scenes = self.envs

    def step(self, actions: Any) -> tuple[list[Any], ...]:
        for env, action in zip(self.envs, actions, strict=True):
            env._pre_step(action)
        for env in self.envs:
            env._physics()
        results = [e._post_step(a) for e, a in zip(self.envs, actions, strict=True)]
        observations, rewards, terminates, truncates, infos = map(list, zip(*results, strict=True))
        return observations, rewards, terminates, truncates, infos

    def reset(self, get_obs: bool = True, **kwargs: Any) -> Any:
        results = [env.reset(get_obs=get_obs, **kwargs) for env in self.envs]
        return tuple(map(list, zip(*results, strict=True))) if get_obs else None

    def close(self) -> None:
        pass

    def __len__(self) -> int:
        return self.num_envs
