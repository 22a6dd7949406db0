"""Every task of a table starts where its seed says, whatever was played before, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlinf.envs import franka_sim, gymnasium_tasks, maniskill, robosuite_env
from rlinf.envs.config import EnvConfig
from rlinf.envs.dm_control import adapter
from rlinf.envs.metaworld.adapter import task_names
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from tests.packages import require_simulator

STEPS = 3


def _maniskill(task: str) -> dict[str, Any]:
    """How its robot is moved, and what it can be paid by."""
    modes, rewards = (
        next(table[begin] for begin in table if task.startswith(begin))
        for table in (maniskill.CONTROL_MODES, maniskill.REWARDS)
    )
    mode = "pd_ee_delta_pos" if "pd_ee_delta_pos" in modes else modes[0]
    return {"task": task, "control_mode": mode, "reward": rewards[0]}


def _dm_control(task: str) -> dict[str, Any]:
    drawn = {"images": True, "image_size": 32} if task.endswith("_vision") else {}
    return {"task": task, **drawn}


OPTIONS = [
    *(("dm_control", _dm_control(task)) for task in adapter.TASKS),
    *(("maniskill", _maniskill(task)) for task in maniskill.TASKS),
    *(("panda_gym", {"task": task}) for task in gymnasium_tasks.PandaGymEnv.tasks),
    *(
        ("gymnasium_robotics", {"task": task})
        for task in gymnasium_tasks.GymnasiumRoboticsEnv.tasks
    ),
    *(("aloha", {"task": task, "states": True}) for task in gymnasium_tasks.AlohaEnv.tasks),
    *(("franka_sim", {"task": task}) for task in franka_sim.FrankaSimEnv.tasks),
    *(("pusht", {"task": task}) for task in gymnasium_tasks.PushTEnv.tasks),
    *(("xarm", {"task": task}) for task in gymnasium_tasks.XArmEnv.tasks),
    *(("robosuite", {"task": task}) for task in robosuite_env.TASKS),
    *(("metaworld", {"task": task}) for task in task_names()),
]


def test_there_are_as_many_tasks_as_the_page_says() -> None:
    counts: dict[str, int] = {}
    for name, _ in OPTIONS:
        counts[name] = counts.get(name, 0) + 1
    assert counts == {
        "dm_control": 51 + 25, "maniskill": 42, "panda_gym": 20, "gymnasium_robotics": 22,
        "robosuite": 19, "metaworld": 50, "aloha": 2, "franka_sim": 4, "pusht": 1, "xarm": 1,
    }  # fmt: skip
    assert len({(name, options["task"]) for name, options in OPTIONS}) == len(OPTIONS)


def _name(each: Any) -> str:
    return str(each["task"] if isinstance(each, dict) else each)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=_name)
def test_a_task_starts_from_its_seed_alone_and_steps(name: str, options: dict[str, Any]) -> None:
    require_simulator(name)
    config = EnvConfig(
        type=name, options=options, max_episode_steps=STEPS, processes=1, step_deadline=200.0
    )
    starts, records = [], []
    listed = [(0, 1), (1, 2), (2, 1)]
    with SupervisedVectorEnv(config, num_envs=1, seed=0, episode_seeds=listed) as env:
        seen = env.reset()
        spec = env.env_spec
        actions = np.clip(0.3, spec.action_low, spec.action_high).astype(np.float32)
        while len(records) < len(listed):
            starts.append({key: value.copy() for key, value in seen.items()})
            step = env.chunk_step(np.broadcast_to(actions, (1, STEPS, spec.action_dim)).copy())
            assert not step.faults, step.faults
            records += step.episodes
            seen = step.observations
    # A start may be solved already, as SO100's cube that lies at its goal is.
    assert all(each.valid and (each.episode_len == STEPS or each.success_once) for each in records)
    for key in starts[0]:
        assert np.array_equal(starts[0][key], starts[2][key])
    assert any(not np.array_equal(start, starts[1][key]) for key, start in starts[0].items())
    assert records[0].episode_return == records[2].episode_return
