"""Steps of simulators in supervised processes beside each simulator's own loop, in one run.

    python benchmarks/simulators.py                          # every one that is installed
    python benchmarks/simulators.py metaworld panda_gym --seconds 2 --turns 9
    python benchmarks/simulators.py --pictures               # with a picture 128 x 128 at each step
    python benchmarks/simulators.py --own-envs 8             # its own loop steps eight as well
    python benchmarks/simulators.py mjlab --starts 5         # both sides begin anew five times
    python benchmarks/simulators.py --vector                 # 64 envs beside AsyncVectorEnv

Both sides step the same task in turns, with random actions, on core 0: of ours both processes, that
of the envs and the one that commands it. Processes of the same program differ in speed by a tenth,
which ``--starts`` averages. The simulator's own loop runs under the interpreter of its environment
(`rlinf env install NAME`) and steps one env, by the class that its users have, drawing as that
draws by default; ours steps eight in one process (``--envs``), one action at a time. Several envs
share the caches of a core: ``--own-envs`` has the loop step so many, one after the other, which
leaves what our processes and bookkeeping cost. `mjlab` and `isaaclab` step a batch on both sides.
Printed, as medians over the turns: env steps per second of both; ours / own of turns that follow
each other, by the clock and by CPU time; seconds until the envs are ready; resident memory of an
env.

``--vector``: states of one gymnasium id, 64 envs in 2 processes, against AsyncVectorEnv with 64
processes. One thread per process (``OMP_NUM_THREADS=1``).
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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil

from rlinf.envs.config import EnvConfig
from rlinf.envs.installation import State, status
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError

BATCHES = {"mjlab": 64, "isaaclab": 16, "genesis": 64}
"""Rows of the simulators that step a batch."""
HORIZON = 150
SIZE = 128

_MEASURE = f"""
import sys, time
HORIZON, SIZE = {HORIZON}, {SIZE}
def measure(reset, step, sample, rows=1):
    actions = [sample() for _ in range(64)]
    reset(); count = 0
    for _ in range(20): step(actions[_])
    print("READY", flush=True)
    for line in sys.stdin:
        begin, wall, cpu = count, time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < float(line):
            if count % HORIZON == HORIZON - 1: reset()
            step(actions[count % 64]); count += 1
        done = (count - begin) * rows
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print("RATE", done / wall, done / cpu, flush=True)
def drawn(env):
    def step(action): env.step(action); return env.render()
    measure(env.reset, step, env.action_space.sample)
"""


def _one_after_the_other(code: str, envs: int) -> str:
    """A loop as it is, over several envs in turn."""
    return f"""
from itertools import cycle
measure_all, loops = measure, []
def measure(reset, step, sample, rows=1): loops.append((reset, step, sample))
for _ in range({envs}): exec({code!r}, dict(globals()))
HORIZON *= len(loops)
steps = cycle([step for _, step, _ in loops])
measure_all(lambda: [reset() for reset, *_ in loops], lambda action: next(steps)(action),
    loops[0][2])
"""


def _gymnasium(module: str, task: str, arguments: str = "") -> str:
    """The loop over an env that is registered with gymnasium."""
    return f"""
import gymnasium, {module}
env = gymnasium.make({task!r}, disable_env_checker=True, max_episode_steps=-1, {arguments})
measure(env.reset, env.step, env.action_space.sample)
"""


def _metaworld(arguments: str, how: str) -> str:
    return f"""
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
env = ALL_V3_ENVIRONMENTS["reach-v3"]({arguments})
env._set_task_called = True; env._freeze_rand_vec = False; env._partially_observable = False
env.max_path_length = 10**9
{how}
"""


def _robosuite(pictures: bool) -> str:
    cameras = "camera_names=['agentview', 'robot0_eye_in_hand'], camera_heights=SIZE, "
    return f"""
import numpy as np, robosuite
env = robosuite.make("Lift", robots="Panda", has_renderer=False, use_camera_obs={pictures},
    has_offscreen_renderer={pictures}, reward_shaping=True, hard_reset=False, ignore_done=True,
    {f"{cameras} camera_widths=SIZE" if pictures else ""})
low, high = env.action_spec
measure(env.reset, env.step, lambda: np.random.uniform(low, high))
"""


def _dm_control(how: str) -> str:
    return f"""
import numpy as np
from dm_control import suite
env = suite.load("walker", "walk", task_kwargs=dict(time_limit=float("inf")))
size = env.action_spec().shape
def draw(action): env.step(action); return env.physics.render(SIZE, SIZE, camera_id=0)
measure(env.reset, {how}, lambda: np.random.uniform(-1, 1, size))
"""


def _maniskill(backend: str, obs_mode: str) -> str:
    return f"""
import sapien
class Nothing:
    def __init__(self, *a, **k): self.__dict__.update(k)
if {backend!r} == "none":
    sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = Nothing
import gymnasium, mani_skill.envs
env = gymnasium.make("PushCube-v1", num_envs=1, obs_mode={obs_mode!r}, sim_backend="physx_cpu",
    control_mode="pd_ee_delta_pos", render_backend={backend!r},
    sensor_configs=dict(width=SIZE, height=SIZE)).unwrapped
measure(env.reset, env.step, env.single_action_space.sample)
"""


_MJLAB = f"""
BATCH = {BATCHES["mjlab"]}
import contextlib, io, torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg
with contextlib.redirect_stdout(io.StringIO()):
    config = load_env_cfg("Mjlab-Cartpole-Balance")
    config.scene.num_envs = BATCH
    config.seed, config.episode_length_s = 0, 1e9
    env = ManagerBasedRlEnv(config, device="cpu")
size = env.action_manager.total_action_dim
measure(lambda: env.reset(), env.step, lambda: torch.rand(BATCH, size) * 2 - 1, rows=BATCH)
"""

_ISAACLAB = f"""
import gymnasium, isaaclab_tasks, newton.examples, pathlib, tempfile, torch
from isaaclab_tasks.utils import parse_env_cfg
BATCH = {BATCHES["isaaclab"]}
config = parse_env_cfg("Isaac-Cartpole", "cpu", BATCH)
text = pathlib.Path(newton.examples.get_asset("cartpole_single_pendulum.usda")).read_text()
folder = tempfile.TemporaryDirectory()
robot = pathlib.Path(folder.name) / "cartpole.usda"
robot.write_text(text.replace('"cartPole"', '"cartpole"'))
config.scene.robot.spawn.usd_path, config.scene.ground = str(robot), None
config.sim.physics.use_cuda_graph = False
env = gymnasium.make("Isaac-Cartpole", cfg=config).unwrapped
measure(env.reset, env.step, lambda: 2 * torch.rand(BATCH, 1) - 1, rows=BATCH)
"""

_GENESIS = f"""
BATCH = {BATCHES["genesis"]}
import genesis, torch
genesis.init(backend=genesis.cpu, logging_level="error", seed=0)
options = genesis.options.SimOptions(dt=0.02, substeps=2)
scene = genesis.Scene(show_viewer=False, sim_options=options)
scene.add_entity(genesis.morphs.Plane())
cube = scene.add_entity(genesis.morphs.Box(size=(0.04,) * 3, pos=(0.5, 0.0, 0.02)))
arm = scene.add_entity(genesis.morphs.MJCF(file="xml/franka_emika_panda/panda.xml"))
scene.build(n_envs=BATCH)
arm.set_dofs_kp((4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 100.0, 100.0))
arm.set_dofs_kv((450.0, 450.0, 350.0, 350.0, 200.0, 200.0, 200.0, 10.0, 10.0))
largest = torch.tensor([87.0] * 4 + [12.0] * 3 + [100.0] * 2)
arm.set_dofs_force_range(-largest, largest)
hand, (low, high) = arm.get_link("hand"), arm.get_dofs_limit()
home = torch.tensor([0.0, -0.4, 0.0, -2.2, 0.0, 1.8, 0.785, 0.04, 0.04]).repeat(BATCH, 1)
reach = torch.tensor([0.05] * 7 + [0.01] * 2)
def reset():
    global targets
    scene.reset()
    targets = home.clone()
    arm.set_dofs_position(targets)
def step(action):
    global targets
    targets = torch.clamp(targets + reach * action, low, high)
    arm.control_dofs_position(targets)
    scene.step()
    found = (hand.get_pos(), hand.get_quat(), arm.get_dofs_position()[:, 7:], cube.get_pos(),
             cube.get_quat())
    states = torch.cat(found, dim=-1)
    height = states[:, 11] - 0.02
    near = 1.0 - torch.tanh(5.0 * torch.linalg.norm(states[:, :3] - states[:, 9:12], dim=1))
    lifted, success = torch.clamp(height / 0.1, 0.0, 1.0), height >= 0.1
    return states, near + lifted + 5.0 * success, success
measure(reset, step, lambda: 2 * torch.rand(BATCH, 9) - 1, rows=BATCH)
"""
"""The scene of ours, as a user of Genesis writes it; it has no environments of its own."""


def _libero(env_class: str, arguments: str) -> str:
    return f"""
import os, numpy as np
from libero.libero import benchmark, get_libero_path
from libero.libero.envs.env_wrapper import {env_class}
task = benchmark.get_benchmark_dict()["libero_spatial"]().get_task(0)
env = {env_class}({arguments}, bddl_file_name=os.path.join(
    get_libero_path("bddl_files"), task.problem_folder, task.bddl_file), hard_reset=False,
    ignore_done=True)
measure(env.reset, env.step, lambda: np.random.uniform(-1, 1, 7))
"""


def _calvin(cameras: str) -> str:
    """The loop of CALVIN's evaluation, which judges at each step. Built as ours is: the code needs
    stand-ins under a newer numpy."""
    return f"""
import numpy as np, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from rlinf.envs.calvin import CalvinEnv, CalvinOptions
made = CalvinEnv(CalvinOptions())
env, start = made._env, made._env.get_info()
env.cameras = {cameras}
def sample(): return np.append(np.random.uniform(-1, 1, 6), np.random.choice([-1.0, 1.0]))
def step(action):
    *_, info = env.step(action)
    return made._oracle.get_task_info_for_set(start, info, {{"open_drawer"}})
measure(env.reset, step, sample)
"""


Loops = dict[str, tuple[dict[str, Any], str]]

STATES: Loops = {
    "metaworld": (
        {"task": "reach-v3"},
        _metaworld("", "measure(env.reset, env.step, env.action_space.sample)"),
    ),
    "panda_gym": (
        {"task": "PandaReachDense-v3"},
        _gymnasium("panda_gym", "PandaReachDense-v3", "render_mode='rgb_array', renderer='Tiny'"),
    ),
    "gymnasium_robotics": (
        {"task": "FetchReachDense-v4"},
        _gymnasium("gymnasium_robotics", "FetchReachDense-v4"),
    ),
    "pusht": ({"task": "gym_pusht/PushT-v0"}, _gymnasium("gym_pusht", "gym_pusht/PushT-v0")),
    "xarm": (
        {"task": "gym_xarm/XarmLift-v0"},
        _gymnasium("gym_xarm", "gym_xarm/XarmLift-v0", "obs_type='state'"),
    ),
    "franka_sim": (
        {"task": "gym_hil/PandaPickCubeBase-v0"},
        _gymnasium("gym_hil", "gym_hil/PandaPickCubeBase-v0"),
    ),
    "dm_control": ({"task": "walker-walk"}, _dm_control("env.step")),
    "robosuite": ({"task": "Lift"}, _robosuite(pictures=False)),
    "maniskill": ({"task": "PushCube-v1"}, _maniskill("none", "state")),
    "libero": (
        {"tasks": [0], "images": False},
        _libero("ControlEnv", "has_offscreen_renderer=False, use_camera_obs=False"),
    ),
    "calvin": ({"images": False}, _calvin("[]")),
    "mjlab": ({"task": "Mjlab-Cartpole-Balance", "own_seeds": False}, _MJLAB),
    "isaaclab": ({"task": "Isaac-Cartpole", "offline": True, "own_seeds": False}, _ISAACLAB),
    "genesis": ({}, _GENESIS),
}
"""Options of ours, and the loop that the simulator's users write, on the same task."""

PICTURES: Loops = {
    "metaworld": (
        {"task": "reach-v3", "images": True, "image_size": SIZE},
        _metaworld(
            f"render_mode='rgb_array', width={SIZE}, height={SIZE}, camera_name='corner2'",
            "drawn(env)",
        ),
    ),
    "dm_control": (
        {"task": "walker-walk", "images": True, "image_size": SIZE},
        _dm_control("draw"),
    ),
    "robosuite": ({"task": "Lift", "images": True, "image_size": SIZE}, _robosuite(pictures=True)),
    "libero": (
        {"tasks": [0], "image_size": SIZE},
        _libero("OffScreenRenderEnv", "camera_heights=SIZE, camera_widths=SIZE"),
    ),
    "calvin": ({}, _calvin("env.cameras")),
    "aloha": (
        {"task": "gym_aloha/AlohaTransferCube-v0"},
        _gymnasium("gym_aloha", "gym_aloha/AlohaTransferCube-v0"),
    ),
    "maniskill": (
        {"task": "PushCube-v1", "images": True, "image_size": SIZE},
        _maniskill("cpu", "rgb+state"),
    ),
}  # fmt: skip
"""The same with pictures: those that our env gives, and those that the loop draws."""


class OwnLoop:
    """The simulator's own loop in a process on core 0, which waits between its turns."""

    def __init__(self, config: EnvConfig, code: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            ["taskset", "-c", "0", config.interpreter or sys.executable, "-c", _MEASURE + code],
            env={**os.environ, **config.environment}, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._line("READY")

    def turn(self, seconds: float) -> tuple[float, ...]:
        """Env steps per second, and per second of CPU time."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin)
        return tuple(map(float, self._line("RATE").split()[1:]))

    def _line(self, start: str) -> str:
        for line in self._process.stdout or ():
            if line.startswith(start):
                return line
        self._errors.seek(0)
        raise SystemExit(f"the simulator's own loop failed:\n{self._errors.read()[-2000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:  # fmt: skip
        self._process.kill()
        self._process.communicate()


@dataclass
class OurLoop:
    """Envs in one supervised process, one action at a time."""

    env: SupervisedVectorEnv
    count: int = 0
    process: psutil.Process = field(init=False)

    def __post_init__(self) -> None:
        low, high = np.array(self.env.env_spec.action_low), np.array(self.env.env_spec.action_high)
        shape = (64, self.env.num_envs, 1, len(low))
        self.actions = np.random.default_rng(0).uniform(low, high, shape).astype(np.float32)
        self.process = psutil.Process(self.env.process_ids[0])
        self.env.reset()

    def turn(self, seconds: float) -> tuple[float, ...]:
        """Env steps per second, and per second of CPU time of both processes."""
        begin, wall, cpu = self.count, time.perf_counter(), self._cpu()
        while time.perf_counter() - wall < seconds:
            self.env.chunk_step(self.actions[self.count % 64])
            self.count += 1
        done = (self.count - begin) * self.env.num_envs
        return done / (time.perf_counter() - wall), done / (self._cpu() - cpu)

    def _cpu(self) -> float:
        return time.process_time() + sum(self.process.cpu_times()[:2])


def beside_own(name: str, loops: Loops, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a simulator in turns."""
    options, code = loops[name]
    envs, own_envs = arguments.envs, arguments.own_envs
    if own_envs > 1 and name not in BATCHES:
        code = _one_after_the_other(code, own_envs)
    config = EnvConfig(
        type=name, options=options, max_episode_steps=HORIZON, processes=1,
        ignore_terminations=True, start_deadline=900.0, step_deadline=200.0,
    )  # fmt: skip
    envs = BATCHES.get(name, envs)
    pairs: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for _ in range(arguments.starts):
        begin = time.perf_counter()
        with SupervisedVectorEnv(config, num_envs=envs, seed=0, affinity=[0]) as env:
            ours = OurLoop(env)
            start = time.perf_counter() - begin
            with OwnLoop(config, code) as own:
                for _ in range(arguments.turns):
                    pairs.append((own.turn(arguments.seconds), ours.turn(arguments.seconds)))
            memory = ours.process.memory_info().rss / envs / 2**20
    middle = [[statistics.median(pair[side][by] for pair in pairs) for by in (0, 1)]
              for side in (0, 1)]  # fmt: skip
    clock, cpu = (statistics.median(pair[1][by] / pair[0][by] for pair in pairs) for by in (0, 1))
    print(
        f"{name:20s} own {middle[0][0]:7.1f} steps/s  ours {middle[1][0]:7.1f}  ratio {clock:5.2f} "
        f"by the clock, {cpu:5.2f} by CPU time;  {envs} envs ready in {start:5.1f} s, "
        f"{memory:4.0f} MB each",
        flush=True,
    )
    return {
        "name": name, "own": middle[0], "ours": middle[1], "clock": clock, "cpu": cpu,
        "envs": envs, "start": start, "memory_mb": memory,
    }  # fmt: skip


def vector(seconds: float) -> dict[str, Any]:
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
    zeros = np.zeros((envs, actions.shape[-1]), np.float32)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        peer.step(zeros)
        count += 1
    theirs = count * envs / (time.perf_counter() - begin)
    peer.close()
    print(f"{envs} x {name}: ours {ours:.0f} steps/s, AsyncVectorEnv {theirs:.0f}, "
          f"ratio {ours / theirs:.2f}")  # fmt: skip
    return {"name": name, "ours": ours, "async": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*STATES, *PICTURES, []], help="Env types.")
    parser.add_argument("--seconds", type=float, default=2.0, help="Of every turn.")
    parser.add_argument("--turns", type=int, default=7, help="Turns of each side.")
    parser.add_argument("--starts", type=int, default=1, help="Of each side.")
    parser.add_argument("--envs", type=int, default=8, help="Of ours, in its one process.")
    parser.add_argument("--own-envs", type=int, default=1, help="Of the simulator's own loop.")
    parser.add_argument("--pictures", action="store_true", help="Draw at every step.")
    parser.add_argument("--vector", action="store_true", help="64 envs beside AsyncVectorEnv.")
    parser.add_argument("--json", help="File for the figures.")
    arguments = parser.parse_args()
    loops, rows = PICTURES if arguments.pictures else STATES, []
    if arguments.vector:
        rows.append(vector(arguments.seconds))
    else:
        os.sched_setaffinity(0, {0})
    for name in () if arguments.vector else arguments.names or loops:
        found = status(name)
        if found.state is State.READY:
            try:
                rows.append(beside_own(name, loops, arguments))
            except ConfigError as error:  # such as no device to draw with
                print(f"{name:20s} {error}")
        else:
            print(f"{name:20s} {found.state}: {found.detail}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
