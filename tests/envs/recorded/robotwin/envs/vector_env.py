"""A toy of two arms that go where they are told, behind the interface of RoboTwin's VectorEnv.

Its oddities are the real one's: the constructor writes into its mapping, ``reset`` returns nothing
and moves on from a seed whose objects fall, words are drawn by Python's generator, a call executes
a whole chunk and cannot execute an empty one, and after success it says success to every chunk.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np

UNSTABLE = 7
"""Seeds that are divisible by it do not come to rest."""
WORDS = {"seen": ("Lift the pot.", "Raise the pot!"), "unseen": ("Get that pot up.",)}


class UnStableError(Exception):
    pass


class Task:
    def __init__(self) -> None:
        self.ep_num = -1

    def setup_demo(self, now_ep_num: int = 0, seed: int = 0, **args: Any) -> None:
        if seed % UNSTABLE == 0:
            raise UnStableError(f"Objects is unstable in seed({seed})")
        self.ep_num = now_ep_num
        self.instruction = args.get("instruction")
        self.wrists = args["camera"]["collect_wrist_camera"]
        self.step_lim: int | None = None
        self.take_action_cnt = 0
        self.eval_success = False
        self.joints = np.random.default_rng(seed).uniform(-0.5, 0.5, 14)
        self.joints[[6, 13]] = 1.0

    def close_env(self, clear_cache: bool = False) -> None:
        pass

    def get_instruction(self) -> str | None:
        return self.instruction

    def get_obs(self) -> dict[str, Any]:
        def picture(shade: int) -> np.ndarray:
            drawn = np.full((240, 320, 3), shade, np.uint8)
            drawn[120, 160] = 250  # the centre
            drawn[0, 0] = 99  # a corner
            return drawn

        cameras = ["head_camera", *(["left_camera", "right_camera"] if self.wrists else [])]
        return {
            "observation": {
                camera: {"rgb": picture(40 + 10 * place)} for place, camera in enumerate(cameras)
            },
            "joint_action": {"vector": self.joints.copy()},
        }

    def gen_sparse_reward_data(self, chunk_actions: np.ndarray) -> tuple[Any, Any, Any, Any]:
        infos = {"success": False}
        reward, termination = np.array([0], np.float32), np.array([0], np.int32)
        truncation = np.array([0], np.int32)
        if not self.eval_success:
            if self.take_action_cnt == self.step_lim:
                return reward, termination, np.array([1], np.int32), infos
            self.take_action_cnt += chunk_actions.shape[0]
            _ = 100 % len(chunk_actions[:, 6])
            for action in chunk_actions:
                self.joints = np.array(action, np.float64)
                if action[6] < 0.05:  # the left gripper holds the handle
                    self.eval_success = True
                    break
        if self.eval_success:
            infos["success"] = True
            reward, termination = np.array([1], np.float32), np.array([1], np.int32)
        elif self.step_lim is not None and self.take_action_cnt >= self.step_lim:
            truncation = np.array([1], np.int32)
        return reward, termination, truncation, infos


def update_obs(observation: dict[str, Any]) -> dict[str, Any]:
    cameras = observation["observation"]
    return {
        "full_image": cameras["head_camera"]["rgb"],
        "left_wrist_image": cameras.get("left_camera", {}).get("rgb", None),
        "right_wrist_image": cameras.get("right_camera", {}).get("rgb", None),
        "state": observation["joint_action"]["vector"],
    }


class SubEnv:
    def __init__(
        self,
        env_id: int,
        task_name: str,
        args: dict[str, Any],
        env_seed: int | None = None,
        instruction_type: str = "seen",
        global_lock: Any = None,
    ) -> None:
        self.env_seed = env_id if env_seed is None else env_seed
        self.args, self.instruction_type = args, instruction_type
        self.task = Task()

    def setup_task(self) -> None:
        pass

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        outcome = self.task.gen_sparse_reward_data(actions)
        return (self.get_obs(), *outcome)

    def reset(self, env_seed: int | None = None) -> None:
        self.task.close_env(clear_cache=True)
        if env_seed is not None:
            self.env_seed = env_seed
        # of Python's generator, which takes no integer of numpy
        words = WORDS[self.instruction_type]
        self.args["instruction"] = random.Random(self.env_seed).choice(words)
        trial_seed = self.env_seed
        while True:
            try:
                self.task.setup_demo(now_ep_num=trial_seed, seed=trial_seed, **self.args)
                self.task.step_lim = self.args["step_lim"]
                return
            except UnStableError:
                trial_seed += 1

    def get_obs(self) -> dict[str, Any]:
        return {**update_obs(self.task.get_obs()), "instruction": self.task.get_instruction()}

    def close(self, clear_cache: bool = True) -> None:
        self.task.close_env(clear_cache=clear_cache)

    def check_seed(self, seed: int) -> dict[str, Any]:
        stable = seed % UNSTABLE != 0
        return {"setup_demo_success": stable, "play_once_success": stable, "cost_time": 0.0}


class VectorEnv:
    def __init__(
        self,
        task_config: dict[str, Any],
        n_envs: int,
        env_seeds: list[int] | None = None,
        instruction_type: str = "seen",
    ) -> None:
        root = os.getenv("ROBOTWIN_ASSETS_ROOT")
        if not root:
            raise ValueError("ROBOTWIN_ASSETS_ROOT must point to the root containing assets/")
        if not (Path(root) / "assets/embodiments/aloha-agilex").is_dir():
            raise ValueError("RoboTwin asset snapshot is incomplete")
        args = task_config
        args["planner_backend"] = args.get("planner_backend", "curobo")
        args["save_path"] += f"/{args['task_name']}_reward"
        self.args, self.n_envs, self.env_seeds = args, n_envs, env_seeds
        self.envs = [
            SubEnv(i, args["task_name"], args, None, instruction_type) for i in range(n_envs)
        ]

    def step(self, actions: Any) -> tuple[Any, ...]:
        results = [self.envs[i].step(actions[i]) for i in range(self.n_envs)]
        return tuple(list(part) for part in zip(*results, strict=True))

    def reset(self, env_idx: Any = None, env_seeds: Any = None) -> None:
        rows = list(range(self.n_envs)) if env_idx is None else list(env_idx)
        for row in rows:
            known = env_seeds is not None and len(env_seeds) == len(rows)
            self.envs[row].reset(env_seed=env_seeds[rows.index(row)] if known else None)

    def get_obs(self) -> list[dict[str, Any]]:
        return [env.get_obs() for env in self.envs]

    def close(self, clear_cache: bool = True) -> None:
        for env in self.envs:
            env.close(clear_cache=clear_cache)

    def check_seeds(self, seeds: list[int]) -> list[dict[str, Any]]:
        return [env.check_seed(seed) for env, seed in zip(self.envs, seeds, strict=True)]
