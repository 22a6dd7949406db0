"""Steps of simulators in supervised processes beside each simulator's own loop, in one run.

    python benchmarks/simulators.py                          # every one that is installed
    python benchmarks/simulators.py metaworld panda_gym --seconds 5
    python benchmarks/simulators.py --vector                 # 64 envs beside AsyncVectorEnv

Both sides step the same task on one core with random actions and, in turns, for the same time. The
simulator's own loop runs under the interpreter of its environment (`rlinf env install NAME`) and
steps one env, by the class that its users have (a batch of four where it steps batches); ours steps
four in one process, one action at a time. Printed: env steps per second of both, our share, seconds
until the envs are ready, and the resident memory of an env.
``--vector``: states of one gymnasium id, 64 envs in 2 processes, against AsyncVectorEnv with 64
processes and with 2 of 32. One thread per process (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil

from rlinf.envs.config import EnvConfig
from rlinf.envs.installation import State, status
from rlinf.envs.supervised.vector import SupervisedVectorEnv

ENVS = 4
HORIZON = 150

_MEASURE = """
import json, sys, time
def measure(reset, step, sample, seconds, horizon, rows=1):
    reset(); count = 0
    for _ in range(20): step(sample())
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        if count % horizon == horizon - 1: reset()
        step(sample()); count += 1
    print("RATE", rows * count / (time.perf_counter() - begin))
"""

_GYMNASIUM = """
import importlib, gymnasium
importlib.import_module({module!r})
env = gymnasium.make({task!r}, disable_env_checker=True, **{arguments!r})
measure(env.reset, env.step, env.action_space.sample, {seconds}, {horizon})
"""

OWN: dict[str, tuple[dict[str, Any], str]] = {
    "metaworld": (
        {"task": "reach-v3"},
        """
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
env = ALL_V3_ENVIRONMENTS["reach-v3"]()
env._set_task_called = True; env._freeze_rand_vec = False; env._partially_observable = False
env.max_path_length = 10**9
measure(env.reset, env.step, env.action_space.sample, {seconds}, {horizon})
""",
    ),
    "panda_gym": (
        {"task": "PandaReachDense-v3"},
        _GYMNASIUM.replace("{module!r}", "'panda_gym'")
        .replace("{task!r}", "'PandaReachDense-v3'")
        .replace("{arguments!r}", "{{'render_mode': 'rgb_array', 'renderer': 'Tiny'}}"),
    ),
    "gymnasium_robotics": (
        {"task": "FetchReachDense-v4"},
        _GYMNASIUM.replace("{module!r}", "'gymnasium_robotics'")
        .replace("{task!r}", "'FetchReachDense-v4'")
        .replace("{arguments!r}", "{{}}"),
    ),
    "pusht": (
        {"task": "gym_pusht/PushT-v0"},
        _GYMNASIUM.replace("{module!r}", "'gym_pusht'")
        .replace("{task!r}", "'gym_pusht/PushT-v0'")
        .replace("{arguments!r}", "{{}}"),
    ),
    "dm_control": (
        {"task": "walker-walk"},
        """
import numpy as np
from dm_control import suite
env = suite.load("walker", "walk", task_kwargs={{"time_limit": float("inf")}})
size = env.action_spec().shape
measure(env.reset, env.step, lambda: np.random.uniform(-1, 1, size), {seconds}, {horizon})
""",
    ),
    "robosuite": (
        {"task": "Lift"},
        """
import numpy as np, robosuite
env = robosuite.make("Lift", robots="Panda", has_renderer=False, has_offscreen_renderer=False,
    use_camera_obs=False, reward_shaping=True, hard_reset=False, ignore_done=True)
low, high = env.action_spec
measure(env.reset, env.step, lambda: np.random.uniform(low, high), {seconds}, {horizon})
""",
    ),
    "maniskill": (
        {"task": "PushCube-v1"},
        """
import sapien
class Nothing:
    def __init__(self, *a, **k): self.__dict__.update(k)
sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = Nothing
import gymnasium, mani_skill.envs
env = gymnasium.make("PushCube-v1", num_envs=1, obs_mode="state", control_mode="pd_ee_delta_pos",
    sim_backend="physx_cpu", render_backend="none").unwrapped
measure(env.reset, env.step, env.single_action_space.sample, {seconds}, {horizon})
""",
    ),
    "isaaclab": (
        {"task": "Isaac-Cartpole", "offline": True},
        """
import gymnasium, isaaclab_tasks, newton.examples, pathlib, torch
from isaaclab_tasks.utils import parse_env_cfg
config = parse_env_cfg("Isaac-Cartpole", "cpu", 4)
text = pathlib.Path(newton.examples.get_asset("cartpole_single_pendulum.usda")).read_text()
robot = pathlib.Path("{folder}/cartpole.usda")
robot.write_text(text.replace('"cartPole"', '"cartpole"'))
config.scene.robot.spawn.usd_path, config.scene.ground = str(robot), None
config.sim.physics.use_cuda_graph = False
env = gymnasium.make("Isaac-Cartpole", cfg=config).unwrapped
measure(env.reset, env.step, lambda: 2 * torch.rand(4, 1) - 1, {seconds}, {horizon}, rows=4)
""",
    ),
}
"""Options of ours, and the loop that the simulator's users write, on the same task."""


def own_rate(name: str, seconds: float) -> float:
    """Steps per second of the simulator's own loop, on one core."""
    config = EnvConfig(type=name, options=OWN[name][0], max_episode_steps=HORIZON)
    with tempfile.TemporaryDirectory() as folder:
        code = OWN[name][1].format(seconds=seconds, horizon=HORIZON, folder=folder)
        done = subprocess.run(
            ["taskset", "-c", "0", config.interpreter or sys.executable, "-c", _MEASURE + code],
            env={**os.environ, **config.environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name}'s own loop failed:\n{done.stderr[-2000:]}")
    return float(next(line.split()[1] for line in done.stdout.splitlines() if "RATE" in line))


def our_rate(name: str, seconds: float) -> dict[str, float]:
    """Steps per second of four envs in one process, on one core; start, and memory of an env."""
    config = EnvConfig(
        type=name, options=OWN[name][0], max_episode_steps=HORIZON, processes=1,
        ignore_terminations=True, start_deadline=900.0, step_deadline=200.0,
    )  # fmt: skip
    begin = time.perf_counter()
    with SupervisedVectorEnv(config, num_envs=ENVS, seed=0, affinity=[0]) as env:
        env.reset()
        start = time.perf_counter() - begin
        low, high = np.array(env.env_spec.action_low), np.array(env.env_spec.action_high)
        random = np.random.default_rng(0)
        actions = random.uniform(low, high, (64, ENVS, 1, len(low))).astype(np.float32)
        for chunk in actions[:5]:
            env.chunk_step(chunk)
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            env.chunk_step(actions[count % 64])
            count += 1
        rate = count * ENVS / (time.perf_counter() - begin)
        held = psutil.Process(env.process_ids[0]).memory_info().rss
    return {"rate": rate, "start": start, "memory_mb": held / ENVS / 2**20}


def beside_own(names: list[str], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Both sides in turns, for each simulator that is installed."""
    rows = []
    for name in names:
        found = status(name)
        if found.state is not State.READY:
            print(f"{name:20s} {found.state}: {found.detail}")
            continue
        turns = [(own_rate(name, seconds), our_rate(name, seconds)) for _ in range(rounds)]
        share = statistics.median(ours["rate"] / own for own, ours in turns)
        own = statistics.median(own for own, _ in turns)
        ours = {key: statistics.median(o[key] for _, o in turns) for key in turns[0][1]}
        print(
            f"{name:20s} own {own:8.0f} steps/s  ours {ours['rate']:8.0f}  ratio {share:5.2f}  "
            f"{ENVS} envs ready in {ours['start']:5.1f} s  {ours['memory_mb']:5.0f} MB per env",
            flush=True,
        )
        rows.append({"name": name, "own": own, "share": share, **ours})
    return rows


def vector(seconds: float) -> list[dict[str, Any]]:
    """64 envs beside gymnasium's AsyncVectorEnv, on all cores."""
    import gymnasium

    envs, name = 64, "Pusher-v5"
    config = EnvConfig(
        type="gymnasium", options={"id": name, "render_mode": None}, max_episode_steps=100,
        processes=2,
    )  # fmt: skip
    with SupervisedVectorEnv(config, num_envs=envs, seed=0) as env:
        env.reset()
        actions = np.zeros((envs, 1, env.env_spec.action_dim), np.float32)
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            env.chunk_step(actions)
            count += 1
        ours = count * envs / (time.perf_counter() - begin)
    peer = gymnasium.make_vec(name, num_envs=envs, vectorization_mode="async")
    peer.reset(seed=0)
    zeros = np.zeros(peer.action_space.shape, np.float32)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        peer.step(zeros)
        count += 1
    theirs = count * envs / (time.perf_counter() - begin)
    peer.close()
    print(f"{envs} x {name}: ours {ours:.0f} steps/s, AsyncVectorEnv {theirs:.0f}, "
          f"ratio {ours / theirs:.2f}")  # fmt: skip
    return [{"name": name, "ours": ours, "async": theirs}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*OWN, []], help="Env types.")
    parser.add_argument("--seconds", type=float, default=4.0, help="Of every measurement.")
    parser.add_argument("--rounds", type=int, default=2, help="Turns of each side.")
    parser.add_argument("--vector", action="store_true", help="64 envs beside AsyncVectorEnv.")
    parser.add_argument("--json", help="File for the figures.")
    arguments = parser.parse_args()
    rows = (
        vector(arguments.seconds)
        if arguments.vector
        else beside_own(arguments.names or [*OWN], arguments.seconds, arguments.rounds)
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
