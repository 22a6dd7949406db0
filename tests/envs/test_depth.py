"""Depth is what geometry says, lies as the pictures do, and is drawn where it is wanted alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rlinf.envs.config import EnvConfig
from rlinf.envs.env_conformance import check_env
from rlinf.envs.installation import interpreter, variables
from rlinf.envs.metaworld.adapter import MetaWorldEnv, MetaWorldOptions
from rlinf.envs.observation_names import depth_of
from rlinf.envs.supervised.checks import ObservationRows
from tests.packages import require_simulator

SIZE = 48
METAWORLD = {"task": "door-close-v3", "images": True, "image_size": SIZE, "depth": True}


def metaworld(**options: Any) -> MetaWorldEnv:
    pytest.importorskip("metaworld")
    return MetaWorldEnv(MetaWorldOptions(**{**METAWORLD, **options}))


# -- MetaWorld, whose simulator is in the environment of the tests ------------------------------


@pytest.mark.parametrize("camera", ["corner2", "behindGripper", "gripperPOV"])
def test_depth_is_where_the_rays_of_the_camera_end(camera):
    """The first stands on its head, the others are upright; one moves with the hand."""
    env = metaworld(camera=camera)
    from tests.envs.depth_by_rays import depth_by_rays, share_within

    env.reset(seed=0)
    depth = env.step(np.array([0.5, -0.5, -0.5, 1.0], np.float32))[0]["depth.main"]
    assert (depth.shape, depth.dtype) == ((SIZE, SIZE), np.float32)
    simulation = env._task._env
    expected = depth_by_rays(simulation.model, simulation.data, camera, SIZE)
    if camera == "corner2":
        expected = expected[::-1, ::-1]
    assert share_within(depth, expected, 1e-4) > 0.95  # others are edges, and what is no geom
    for turned in (depth[::-1], depth[:, ::-1], depth[::-1, ::-1]):
        assert share_within(turned, expected, 1e-4) < 0.9
    model, nothing = simulation.model, np.isinf(expected)
    if nothing.any():
        farthest = model.vis.map.zfar * model.stat.extent
        assert (depth[nothing] > 0.99 * farthest).mean() > 0.9


def test_depth_stays_the_same_with_effects_and_in_another_size():
    pictures = [metaworld(effects=effects).reset(seed=0)[0] for effects in (False, True)]
    plain, drawn = (each["depth.main"] for each in pictures)
    scene = plain < 10
    assert scene.mean() > 0.5
    assert (np.abs(plain - drawn)[scene] < 1e-4).mean() > 0.95
    larger = metaworld(image_size=2 * SIZE).reset(seed=0)[0]["depth.main"]
    assert larger.shape == (2 * SIZE, 2 * SIZE)
    assert (np.abs(larger[::2, ::2] - plain)[scene] < 0.05).mean() > 0.7  # others are edges


def test_pictures_are_the_same_beside_their_depth():
    env, without = metaworld(), metaworld(depth=False)
    shown, alone = env.reset(seed=3)[0], without.reset(seed=3)[0]
    assert shown.keys() == {*alone, "depth.main"}
    assert np.array_equal(shown["main_images"], alone["main_images"])
    assert env.observation_space["depth.main"].shape == (SIZE, SIZE)


def test_within_a_chunk_no_depth_is_drawn(monkeypatch):
    env = metaworld()
    env.reset(seed=0)
    from rlinf.envs.mujoco.picture import Painter

    drawn, own = [], Painter.observations
    monkeypatch.setattr(
        Painter, "observations", lambda *given, **named: drawn.append(1) or own(*given, **named)
    )
    for _ in range(3):
        env.step_blind(np.zeros(4, np.float32))
    assert not drawn
    env.observe()
    assert len(drawn) == 1


@pytest.mark.slow
def test_metaworld_with_depth_keeps_the_protocol():
    pytest.importorskip("metaworld")
    results = check_env(EnvConfig(type="metaworld", options=METAWORLD, max_episode_steps=20))
    assert all(result.passed for result in results), results
    (pictures,) = (result for result in results if result.name == "pictures")
    assert "; depths from 1." in pictures.detail


# -- what is refused ----------------------------------------------------------------------------


def test_a_simulator_without_depth_says_which_have_it():
    options = {"task": "gym_pusht/PushT-v0", "depth": True}
    with pytest.raises(ValidationError) as refused:
        EnvConfig(type="pusht", options=options, max_episode_steps=5)
    for name in ("metaworld", "robosuite", "libero", "dm_control", "calvin", "franka_sim"):
        assert name in str(refused.value).partition("env types with it: ")[2]


def test_depth_without_pictures_is_refused():
    with pytest.raises(ValidationError, match=r"has no effect.*images: true"):
        EnvConfig(
            type="metaworld",
            options={"task": "reach-v3", "depth": True},
            max_episode_steps=5,
        )


# -- conformance --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "told"),
    [
        ("np.full((32, 32), 0.5 + self._position[0] ** 2, np.float32)", "is the same everywhere"),
        ("self.render()[..., 0].astype(np.float32)", "holds 0, which is no distance"),
        ("np.ones((16, 32), np.float32)", r"is \[16, 32\], its picture main_images \[32, 32, 3\]"),
        ("self.render()[..., 0].astype(np.float32) * np.float32(np.nan)", "holds a NaN"),
        ("1 + self.render()[..., 0].astype(np.float32)", ""),
    ],
)
def test_depth_that_cannot_be_is_told(tmp_path, point, depth, told):
    source = tmp_path / "outside_point.py"
    text = source.read_text()
    rows = 16 if "16" in depth else 32
    shown = 'picture = {"main_images": self.render()} if'
    declared = '            self.never_black = ("main_images",)\n'
    assert shown in text
    assert declared in text
    text = text.replace(
        shown, f'picture = {{"main_images": self.render(), "depth.main": {depth}}} if'
    )
    box = f"spaces.Box(0, np.inf, ({rows}, 32), np.float32)"
    source.write_text(
        text.replace(
            declared, f'{declared}            self.observation_space["depth.main"] = {box}\n'
        )
    )
    results = check_env(point(options={"pictures": True}))
    failed = {each.name: each.detail for each in results if not each.passed}
    if told:
        assert re.search(told, " ".join(failed.values())), failed
    else:
        assert not failed
        assert results[-2].detail.endswith("; depths from 1 to 256 m")


def test_a_rebuilt_env_may_be_drawn_a_little_otherwise():
    """As its pictures: by another renderer, depth differs in its last bits."""
    arrays = {"states": np.zeros((1, 2), np.float32), "depth.main": np.ones((1, 4, 4), np.float32)}
    rows = ObservationRows(arrays)
    seen = {"states": np.zeros(2, np.float32), "depth.main": np.full((4, 4), 1.0001, np.float32)}
    assert rows.shows(seen, 0)
    assert not rows.shows({**seen, "states": np.ones(2, np.float32)}, 0)


def test_depth_is_called_as_its_camera_is():
    names = {"main_images": "main", "wrist_images": "wrist", "images.front": "front"}
    assert {key: depth_of(key) for key in names} == {k: f"depth.{n}" for k, n in names.items()}


# -- simulators with environments of their own --------------------------------------------------

_BUILT = """
import sys
import numpy as np
from rlinf.envs.base import REGISTRY
from rlinf.envs.observation_names import depth_of
name, options = sys.argv[1], eval(sys.argv[2])
if name == "calvin":  # to draw its chains takes minutes, and one start will do
    from rlinf.envs import calvin
    def one_chain(source):
        folder = source / "calvin_models" / "calvin_agent" / "evaluation"
        with calvin._stand_ins():
            helper = calvin._module("calvin_agent.evaluation.utils", folder / "utils.py")
        blocks = {"red_block": "table", "blue_block": "table", "pink_block": "slider_right"}
        start = {"led": 0, "lightbulb": 0, "slider": "right", "drawer": "closed", "grasped": 0}
        robot, scene = helper.get_env_state_for_initial_condition({**start, **blocks})
        return [(robot.tolist(), scene.tolist(), ["open_drawer"])] * calvin.CHAINS
    calvin._chains = one_chain
adapter = REGISTRY.load(name)
env = adapter(adapter.Options(images=True, depth=True, **options))
env.reset(seed=1)
low, high = (np.clip(bound, -1, 1) for bound in (env.action_space.low, env.action_space.high))
for _ in range(3):
    env.step(np.random.default_rng(0).uniform(low, high).astype(np.float32))
seen = env.observe()
def told(key, expected, tolerance, turn=np.s_[:]):
    depth = seen[depth_of(key)]
    assert depth.dtype == np.float32 and depth.shape == seen[key].shape[:2], depth.shape
    assert np.isfinite(depth).all() and (depth > 0).all()
    hits = np.isfinite(expected)
    for each in (depth, depth[::-1], depth[:, ::-1]):
        print("share", key, float((np.abs(each[turn] - expected)[hits] <= tolerance).mean()))
"""
_RAYS = """
from tests.envs.depth_by_rays import depth_by_rays
for key, camera in cameras.items():
    told(key, depth_by_rays(model, data, camera, len(seen[key])), 0.01, turn)
"""
_OF_MUJOCO = {
    "robosuite": """
cameras, turn = env._cameras, np.s_[:]
model, data = env._env.sim.model._model, env._env.sim.data._data
""",
    "libero": """
from rlinf.envs.libero import CAMERAS as cameras
turn = np.s_[:, ::-1] if env.options.mirrored else np.s_[:]
simulation = env._present._env.sim
model, data = simulation.model._model, simulation.data._data
""",
    "franka_sim": """
from rlinf.envs.franka_sim import _CAMERAS as cameras
turn, inner = np.s_[:], env._env.unwrapped
model, data = inner.model, inner.data
""",
    "dm_control": """
cameras, turn = {"main_images": env._camera}, np.s_[:]
model, data = env._env.physics.model.ptr, env._env.physics.data.ptr
""",
}
_CALVIN = """
import pybullet
for key, camera in zip(("main_images", "wrist_images"), env._all_cameras):
    view = getattr(camera, "viewMatrix", None) or camera.view_matrix
    to_world = np.linalg.inv(np.array(view).reshape(4, 4).T)
    focal = 0.5 * camera.height / np.tan(np.deg2rad(camera.fov) / 2)
    middle = camera.height / 2
    rows, columns = (np.mgrid[: camera.height : 4, : camera.width : 4] + 0.5 - middle) / focal
    rays = np.stack([columns, -rows, -np.ones_like(rows)], -1).reshape(-1, 3) @ to_world[:3, :3].T
    begin, end = to_world[:3, 3], to_world[:3, 3] + rays * camera.farval
    hits = pybullet.rayTestBatch([begin.tolist()] * len(end), end.tolist(),
                                 physicsClientId=camera.cid)
    far = [hit[2] * camera.farval if hit[0] >= 0 else np.inf for hit in hits]
    told(key, np.reshape(far, rows.shape), 0.01, np.s_[::4, ::4])
"""
_MANISKILL = """
# Of the table, z = 0, and the ground: where the ray through a pixel meets them. Nothing else of
# what is seen lies below 1 mm.
given = {k: v[0].numpy() for k, v in env._env._sensors["base_camera"].get_params().items()}
size, inner, outer = env.options.image_size, given["intrinsic_cv"], given["cam2world_gl"]
rows, columns = np.mgrid[:size, :size] + 0.5
rays = np.stack([(columns - inner[0, 2]) / inner[0, 0], -(rows - inner[1, 2]) / inner[1, 1],
                 -np.ones_like(rows)], -1) @ outer[:3, :3].T
expected = outer[2, 3] / -rays[..., 2]
places = outer[:3, 3] + rays * seen["depth.main"][..., None]
expected[(np.abs(places[..., 2]) > 0.005)] = np.inf
print("table", float(np.isfinite(expected).mean()))
told("main_images", expected, 0.002)
"""


def _shares(name: str, options: dict[str, Any], code: str) -> dict[str, list[float]]:
    """By picture, the share of pixels at the expected depth: as it is, and with rows, or columns,
    the other way round."""
    require_simulator(name)
    python = interpreter(name)
    assert python is not None
    root = str(Path(__file__).parents[2])
    kept = {key: os.environ[key] for key in ("VK_ICD_FILENAMES", "LD_LIBRARY_PATH")
            if key in os.environ}  # fmt: skip
    done = subprocess.run(
        [python, "-c", _BUILT + code, name, repr(options)],
        env={**variables(name), **kept, "PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Vulkan device" in done.stderr:
        pytest.skip("there is no Vulkan device")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("share "):
            _, key, share = line.split()
            found.setdefault(key, []).append(ast.literal_eval(share))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("robosuite", {"task": "Lift", "image_size": SIZE}),
        ("robosuite", {"task": "Door", "image_size": SIZE, "camera": "frontview"}),
        ("libero", {"tasks": (0,), "settle_steps": 1, "image_size": SIZE}),
        ("libero", {"tasks": (0,), "settle_steps": 1, "image_size": SIZE, "mirrored": False}),
        ("franka_sim", {"task": "gym_hil/PandaPickCube-v0", "image_size": SIZE}),
        ("dm_control", {"task": "walker-walk", "image_size": SIZE}),
        ("dm_control", {"task": "reach_site_vision", "image_size": SIZE}),
    ],
)
def test_depth_of_other_simulators_on_mujoco_is_where_rays_end(name, options):
    """To the centimetre: round things are drawn with flat sides."""
    for key, (share, *turned) in _shares(name, options, _OF_MUJOCO[name] + _RAYS).items():
        assert share > 0.97, key
        assert min(turned) < 0.95, key  # a table from above is nearly the same when turned


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_depth_of_calvin_is_where_rays_end():
    """What is drawn and what is collided with differ a little there."""
    for key, (share, *turned) in _shares("calvin", {}, _CALVIN).items():
        assert share > 0.8, key
        assert max(turned) < 0.6, key


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("states", ["all", "robot"])
def test_depth_of_maniskill_is_that_of_its_table(states):
    options = {"task": "PushCube-v1", "image_size": SIZE, "states": states}
    (share, upside_down, _), = _shares("maniskill", options, _MANISKILL).values()  # fmt: skip
    assert share > 0.99
    assert upside_down < 0.5
