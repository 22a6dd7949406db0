"""Which renderer env processes are given, and that it really draws."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from rlinf.envs import installation, renderers
from rlinf.envs.config import EnvConfig
from rlinf.envs.renderers import (
    LIBRARIES,
    MUJOCO,
    SETTINGS,
    Drawing,
    draw,
    loads,
    mujoco_renderer,
)


@pytest.mark.parametrize(
    ("there", "draws", "chosen"),
    [
        (("egl",), False, "egl"),  # nothing to choose, so nothing is drawn
        (("osmesa",), False, "osmesa"),
        (("egl", "osmesa"), True, "egl"),
        (("egl", "osmesa"), False, "osmesa"),
        ((), True, "disable"),
    ],
)
def test_the_renderer_is_one_that_draws(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], draws: bool, chosen: str
) -> None:
    libraries = {LIBRARIES[name] for name in there}
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(renderers, "loads", lambda library: library in libraries)
    drawing = Drawing() if draws else Drawing("no device")
    monkeypatch.setattr(renderers, "draw", lambda *given, **named: drawing)
    mujoco_renderer.cache_clear()
    try:
        assert mujoco_renderer() == chosen
        assert installation.variables("libero")["MUJOCO_GL"] == chosen
    finally:
        mujoco_renderer.cache_clear()


def test_the_user_chooses_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    mujoco_renderer.cache_clear()
    try:
        assert installation.variables("metaworld")["MUJOCO_GL"] == "osmesa"
    finally:
        mujoco_renderer.cache_clear()


@pytest.mark.parametrize(("chosen", "told"), [("eggl", 1), ("egl", 0), ("disable", 0)])
def test_what_the_shell_says_and_is_no_renderer_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen: str, told: int
) -> None:
    monkeypatch.setenv("MUJOCO_GL", chosen)
    monkeypatch.setattr(renderers, "loads", lambda library: library == LIBRARIES["egl"])
    mujoco_renderer.cache_clear()
    try:
        assert [mujoco_renderer(), mujoco_renderer()] == ["egl", "egl"]
    finally:
        mujoco_renderer.cache_clear()
    said = "the shell's MUJOCO_GL=eggl is not used: it is no renderer; did you mean `egl`?"
    assert [said in message for message in caplog.messages] == [True] * told


@pytest.mark.parametrize(
    ("identity", "given"),
    [("HalfCheetah-v5", "osmesa"), ("package:Arm-v0", "osmesa"), ("CartPole-v1", None)],
)
def test_gymnasium_is_given_one_where_mujoco_may_draw(
    monkeypatch: pytest.MonkeyPatch, identity: str, given: str | None
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    mujoco_renderer.cache_clear()
    section = {"type": "gymnasium", "options": {"id": identity}, "max_episode_steps": 10}
    config = EnvConfig.model_validate(section)
    own = EnvConfig.model_validate({**section, "variables": {"MUJOCO_GL": "egl"}})
    try:
        assert config.environment.get("MUJOCO_GL") == given
        assert own.environment["MUJOCO_GL"] == "egl"
    finally:
        mujoco_renderer.cache_clear()


def test_either_library_is_enough_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    opencv = "libGL.so.1"
    for there, unfit in (([opencv, "libOSMesa.so.8"], False), ([opencv], True), ([], True)):
        monkeypatch.setattr(installation, "loads", there.__contains__)
        found = installation.status("robosuite")
        assert (found.state is installation.State.UNFIT) == unfit, found


_needs_mujoco = pytest.mark.skipif(
    importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed"
)


@_needs_mujoco
@pytest.mark.parametrize("renderer", LIBRARIES)
def test_mujoco_draws_boxes(renderer: str) -> None:
    if not loads(LIBRARIES[renderer]):
        pytest.skip(f"{LIBRARIES[renderer]} is not installed")
    found = draw(MUJOCO, renderer, size=48)
    assert found.fault == ""
    assert found.frame.startswith("frame 48x48")
    assert found.per_second > 0


# What one env of a process does while the graphics of the other one are at hand.
_NEIGHBOURS = """
import sys
import mujoco, numpy
from rlinf.envs.mujoco.picture import Painter
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='box' size='.4 .4 .1'/>"
    "<camera name='above' pos='0 0 2'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
one, other = Painter(model), Painter(model)
one.paint(data, "above", 64)
seen = other.paint(data, "above", 64)
if sys.argv[1] == "closes":
    one.close()
else:
    assert one.paint(data, "above", 96).any()
assert seen.any()
assert numpy.array_equal(other.paint(data, "above", 64), seen)
"""


@_needs_mujoco
@pytest.mark.parametrize("renderer", LIBRARIES)
@pytest.mark.parametrize("what", ["closes", "draws a larger picture"])
def test_an_env_that_gives_its_graphics_back_leaves_those_of_its_neighbour(
    renderer: str, what: str
) -> None:
    if not loads(LIBRARIES[renderer]):
        pytest.skip(f"{LIBRARIES[renderer]} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _NEIGHBOURS, what],
        env={**os.environ, **SETTINGS[renderer]}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
