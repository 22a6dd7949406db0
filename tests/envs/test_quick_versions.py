"""Where an adapter takes a shorter way than its simulator, the numbers are the simulator's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlinf.envs.installation import interpreter, variables
from tests.packages import require_simulator

# Prints the states to the bit and the reward to twelve digits, of either side.
_PLAY = """
import sys
import numpy as np
from rlinf.envs.base import REGISTRY
def show(states, reward=0.0):
    print(np.float32(states).tobytes().hex(), "%.12g" % reward)
name, task, side = sys.argv[1:]
adapter = REGISTRY.load(name)
def play(low, high, reset, step):
    draw = np.random.default_rng(0)
    for seed in (3, 4):
        show(reset(seed))
        for count in range(60):
            if count % 6 == 0:
                action = draw.uniform(np.float32(low), np.float32(high))
            show(*step(action.astype(np.float32)))
"""
_OURS = """
env = adapter(adapter.Options(task=task))
def step(action):
    seen, reward, *_ = env.step(action)
    return seen["states"], reward
play(env.action_space.low, env.action_space.high, lambda seed: env.reset(seed=seed)[0]["states"],
     step)
"""
_OWN = {
    "dm_control": """
from dm_control import suite
env = suite.load(*task.split("-"), task_kwargs={"random": 0, "time_limit": float("inf")})
def flat(now): return np.concatenate([np.ravel(part) for part in now.observation.values()])
def reset(seed):
    env.task.random.seed(seed)
    return flat(env.reset())
def step(action):
    now = env.step(np.float64(action))
    return flat(now), now.reward
limits = env.action_spec()
play(limits.minimum, limits.maximum, reset, step)
""",
    "pusht": """
import gymnasium, gym_pusht
env = gymnasium.make(task, disable_env_checker=True, max_episode_steps=-1)
play(env.action_space.low, env.action_space.high, lambda seed: env.reset(seed=seed)[0],
     lambda action: env.step(action)[:2])
""",
    "xarm": """
import gymnasium, gym_xarm
env = gymnasium.make(task, obs_type="state", disable_env_checker=True, max_episode_steps=-1)
inner = env.unwrapped
def reset(seed):  # what the last episode left in the solver shows in the next one
    inner._mujoco.mj_resetData(inner.model, inner.data)
    return env.reset(seed=seed)[0]
play(env.action_space.low, env.action_space.high, reset, lambda action: env.step(action)[:2])
""",
    "panda_gym": """
import gymnasium, panda_gym
def made():
    env = gymnasium.make(task, renderer="Tiny", disable_env_checker=True, max_episode_steps=-1)
    client = env.unwrapped.sim.physics_client
    client.setPhysicsEngineParameter(deterministicOverlappingPairs=1)
    return env
env = made()
def flat(seen): return np.concatenate([seen[key] for key in env.observation_space.spaces])
def reset(seed):  # what touched in an episode shows in its next one
    global env
    env.close()
    env = made()
    return flat(env.reset(seed=seed)[0])
def step(action):
    seen, reward, *_ = env.step(action)
    return flat(seen), reward
play(env.action_space.low, env.action_space.high, reset, step)
""",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("dm_control", "walker-walk"),
        ("dm_control", "humanoid-run"),
        ("dm_control", "finger-turn_hard"),
        ("dm_control", "quadruped-run"),
        ("pusht", "gym_pusht/PushT-v0"),
        ("xarm", "gym_xarm/XarmLift-v0"),
        ("panda_gym", "PandaPushDense-v3"),
    ],
)
def test_an_adapter_gives_the_numbers_of_its_simulator(name: str, task: str) -> None:
    require_simulator(name)
    python = interpreter(name)
    assert python is not None
    root = str(Path(__file__).parents[2])
    played = []
    for side, code in (("ours", _OURS), ("own", _OWN[name])):
        done = subprocess.run(
            [python, "-c", _PLAY + code, name, task, side],
            env={**variables(name), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        played.append([line for line in done.stdout.splitlines() if len(line.split()) == 2])
    assert len(played[0]) > 120
    assert played[0] == played[1]


_ALOHA = """
import gymnasium, gym_aloha
import numpy as np
from rlinf.envs.gymnasium_tasks import AlohaEnv
task = "gym_aloha/AlohaTransferCube-v0"
env = AlohaEnv(AlohaEnv.Options(task=task, states=True))
own = gymnasium.make(
    task, obs_type="pixels_agent_pos", disable_env_checker=True, max_episode_steps=-1
)
physics, drawn = env._env.unwrapped._env.physics, []
render = physics.render
physics.render = lambda **how: drawn.append(how["camera_id"]) or render(**how)
env.reset(seed=3)
own.reset(seed=3)
drawn.clear()
draw = np.random.default_rng(0)
for turn in range(2):
    for count in range(3):
        action = draw.uniform(-1, 1, 14).astype(np.float32)
        theirs, reward, *_ = own.step(action)
        if count < 2:
            mine = env.step_blind(action)[0]
        elif turn:
            seen, mine, *_ = env.step(action)
        else:
            mine, seen = env.step_blind(action)[0], env.observe()
        assert mine == reward
    assert drawn == ["top"] * (turn + 1), drawn
    assert np.array_equal(seen["main_images"], theirs["pixels"]["top"])
    assert np.array_equal(seen["states"], np.float32(theirs["agent_pos"]))
"""

_PUSHT = """
import gymnasium, gym_pusht
import numpy as np
from rlinf.envs.gymnasium_tasks import PushTEnv
env = PushTEnv(PushTEnv.Options(task="gym_pusht/PushT-v0", images=True))
own = gymnasium.make(
    "gym_pusht/PushT-v0", obs_type="pixels_agent_pos", disable_env_checker=True,
    max_episode_steps=-1,
)
inner, drawn = env._env.unwrapped, []
render = inner._render
inner._render = lambda *how: drawn.append(how) or render(*how)
env.reset(seed=3)
own.reset(seed=3)
drawn.clear()
draw = np.random.default_rng(0)
for count in range(6):
    action = draw.uniform(100, 400, 2).astype(np.float32)
    theirs, reward, *_ = own.step(action)
    assert abs(env.step_blind(action)[0] - reward) < 1e-9
assert not drawn
seen = env.observe()
assert len(drawn) == 1
assert np.array_equal(seen["main_images"], theirs["pixels"])
assert np.array_equal(seen["states"], np.float32(theirs["agent_pos"]))
"""


# Its own pictures are drawn by gymnasium's renderer, which it calls as that was before 1.0.
_XARM = """
import gymnasium, gym_xarm
import numpy as np
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
from rlinf.envs.base import REGISTRY
adapter = REGISTRY.load("xarm")
env = adapter(adapter.Options(images=True, effects=True))
own = gymnasium.make("gym_xarm/XarmLift-v0", obs_type="state", disable_env_checker=True)
drawn, picture = [], env.picture
env.picture = lambda size: drawn.append(size) or picture(size)
seen, _ = env.reset(seed=3)
own.reset(seed=3)
assert drawn == [84]
draw = np.random.default_rng(0)
for count in range(6):
    action = draw.uniform(-1, 1, 4).astype(np.float32)
    _, reward, *_ = own.step(action)
    assert abs(env.step_blind(action)[0] - reward) < 1e-9
assert drawn == [84]
seen, inner = env.observe(), own.unwrapped
assert drawn == [84, 84]
assert np.array_equal(seen["states"], np.float32(inner.robot_state))
inner._mujoco.mj_forward(inner.model, inner.data)
renderer = MujocoRenderer(inner.model, inner.data, width=84, height=84, camera_name="camera0")
apart = np.abs(renderer.render("rgb_array").astype(int) - seen["main_images"])
assert apart.mean() < 0.5 and (apart > 8).mean() < 0.01, (apart.mean(), (apart > 8).mean())
"""
# What moves is told without the object, and the picture has what MuJoCo draws of the same camera.
_FETCH = """
import gymnasium, gymnasium_robotics, mujoco
import numpy as np
from rlinf.envs.base import REGISTRY
adapter = REGISTRY.load("gymnasium_robotics")
for task in ("FetchPush-v4", "FetchReach-v4"):
    env = adapter(adapter.Options(task=task, images=True, image_size=96))
    own = gymnasium.make(task, disable_env_checker=True, max_episode_steps=-1)
    drawn, picture = [], env.picture
    env.picture = lambda size: drawn.append(size) or picture(size)
    env.reset(seed=3)
    own.reset(seed=3)
    draw = np.random.default_rng(0)
    for count in range(6):
        action = draw.uniform(-1, 1, 4).astype(np.float32)
        theirs, reward, *_ = own.step(action)
        assert abs(env.step_blind(action)[0] - reward) < 1e-9
    assert drawn == [96]
    seen, inner = env.observe(), own.unwrapped
    assert drawn == [96, 96]
    robot = inner.generate_mujoco_observations()
    expected = np.concatenate([robot[0], robot[3], robot[7], robot[8]])
    assert np.array_equal(seen["states"], np.float32(expected))
    inner._render_callback()
    quality = inner.model.vis.quality
    quality.shadowsize = quality.offsamples = 0
    renderer = mujoco.Renderer(inner.model, 96, 96)
    for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX"):
        renderer.scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
    renderer.update_scene(inner.data, camera="external_camera_0")
    apart = np.abs(renderer.render().astype(int) - seen["main_images"])
    assert apart.mean() < 0.1, apart.mean()
"""
_PANDA_GYM = """
import gymnasium, panda_gym
import numpy as np
from rlinf.envs.base import REGISTRY
adapter = REGISTRY.load("panda_gym")
for task, numbers in (("PandaPushDense-v3", 6), ("PandaPickAndPlace-v3", 7)):
    env = adapter(adapter.Options(task=task, images=True, image_size=64))
    own = gymnasium.make(task, renderer="Tiny", render_mode="rgb_array", disable_env_checker=True,
                         render_width=64, render_height=64)
    drawn, picture = [], env.picture
    env.picture = lambda size: drawn.append(size) or picture(size)
    env.reset(seed=3)
    own.reset(seed=3)
    draw = np.random.default_rng(0)
    for count in range(6):
        action = draw.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        _, reward, *_ = own.step(action)
        assert abs(env.step_blind(action)[0] - reward) < 1e-9
    assert drawn == [64]
    seen = env.observe()
    assert drawn == [64, 64]
    assert seen["states"].shape == (numbers,)
    assert np.array_equal(seen["states"], np.float32(own.unwrapped.robot.get_obs()))
    assert np.array_equal(seen["main_images"], own.render())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("aloha", _ALOHA),
        ("pusht", _PUSHT),
        ("xarm", _XARM),
        ("panda_gym", _PANDA_GYM),
        ("gymnasium_robotics", _FETCH),
    ],
)
def test_of_a_chunk_one_picture_is_drawn_and_it_is_the_simulators(name: str, code: str) -> None:
    require_simulator(name)
    python = interpreter(name)
    assert python is not None
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [python, "-c", code],
        env={**variables(name), "PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        check=True,
    )
