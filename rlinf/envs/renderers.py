"""Which offscreen renderers draw on this machine: one real frame of each, in its own process.

A renderer that is missing a library may end its process instead of raising, and the choice of the
renderer cannot be changed after the first import; hence a process for each.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import sys
from dataclasses import dataclass

from rlinf.config.nearest import did_you_mean

log = logging.getLogger(__name__)
_SECONDS = 120

LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
"""What MuJoCo's renderers load, the better one first: EGL also draws on a GPU."""

RENDERERS = (*LIBRARIES, "glfw", "disable")
"""What ``MUJOCO_GL`` may be: also one that draws on a screen, and none."""

SETTINGS = {
    "egl": {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"},
    "osmesa": {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"},
    "software": {"SDL_VIDEODRIVER": "dummy"},
    "vulkan": {},
}
"""Environment variables that pick a renderer."""

MUJOCO = """
import mujoco
boxes = "".join(
    f"<body pos='{i % 4 * .3} {i // 4 * .3} .1'><geom type='box' size='.1 .1 .1' "
    f"rgba='{i / 12} .5 {1 - i / 12} 1'/></body>" for i in range(12))
model = mujoco.MjModel.from_xml_string(f'''<mujoco>
    <visual><global offwidth="{SIZE}" offheight="{SIZE}"/>
    <quality shadowsize="{4096 if EFFECTS else 0}" offsamples="{4 if EFFECTS else 0}"/></visual>
    <worldbody><light pos="0 0 3"/><geom type="plane" size="2 2 .1"/>{boxes}</worldbody>
    </mujoco>''')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
class Env:
    def reset(self, seed): self.renderer = mujoco.Renderer(model, SIZE, SIZE)
    def render(self):
        self.renderer.update_scene(data)
        return self.renderer.render()
env = Env()
"""
"""Twelve boxes on a plane under a light, drawn by MuJoCo; leaves ``env``."""

SAPIEN = """
import numpy, sapien
scene = sapien.Scene()
scene.set_ambient_light([.4] * 3)
scene.add_directional_light([0, 1, -1], [.5] * 3, shadow=EFFECTS)
scene.add_ground(0)
for i in range(12):
    builder = scene.create_actor_builder()
    material = sapien.render.RenderMaterial(base_color=[i / 12, .5, 1 - i / 12, 1])
    builder.add_box_visual(half_size=[.1] * 3, material=material)
    builder.initial_pose = sapien.Pose([i % 4 * .3, i // 4 * .3, .1])
    builder.build_static()
camera = scene.add_camera("camera", SIZE, SIZE, 1.0, .01, 10)
camera.entity.set_pose(sapien.Pose([-1.5, 0.4, 1.2], [.94, 0, .34, 0]))
class Env:
    def reset(self, seed): pass
    def render(self):
        scene.update_render()
        camera.take_picture()
        return numpy.clip(camera.get_picture("Color")[..., :3] * 255, 0, 255)
env = Env()
"""
"""The same drawn by SAPIEN, which needs a Vulkan device."""

_DRAW = """
import os, sys, time
env.reset(seed=0)
frame = env.render()
env.render()
count, begin, cpu = 0, time.perf_counter(), time.process_time()
while not count or time.perf_counter() - begin < SECONDS:
    env.render()
    count += 1
rates = [count / max(spent, 1e-9)
         for spent in (time.perf_counter() - begin, time.process_time() - cpu)]
print("frame", frame.shape[1], frame.shape[0], float(frame.mean()), *rates)
sys.stdout.flush()
os._exit(0)  # a renderer's destructors complain about a context that is already gone
"""


@dataclass(frozen=True)
class Drawing:
    """What came of drawing."""

    fault: str = ""
    """Why there is no picture, empty where there is one."""
    frame: str = ""
    """Width, height and mean brightness, in words."""
    per_second: float = 0.0
    """Frames per second."""
    per_cpu_second: float = 0.0
    """Frames per second of CPU time of the drawing process, all its threads."""


def draw(
    program: str,
    renderer: str,
    *,
    python: str | None = None,
    size: int = 128,
    seconds: float = 0.0,
    effects: bool = False,
) -> Drawing:
    """Draw in a process of its own and look whether the frame shows anything.

    Args:
        program: Leaves an ``env`` with gymnasium's ``reset`` and ``render``; it knows ``SIZE`` and
            ``EFFECTS``.
        renderer: Of :data:`SETTINGS`.
        python: Interpreter; None: this one.
        size: Height and width in pixels, for a program that heeds it.
        seconds: How long to draw; at least one frame.
        effects: Whether to draw shadows and smooth edges, for a program that heeds it.
    """
    constants = f"SIZE, SECONDS, EFFECTS = {size}, {seconds}, {effects}\n"
    try:
        result = subprocess.run(
            [python or sys.executable, "-c", constants + program + _DRAW],
            capture_output=True,
            text=True,
            timeout=_SECONDS + seconds,
            check=False,
            env={**os.environ, **SETTINGS[renderer]},
        )
    except subprocess.TimeoutExpired:
        return Drawing(f"no frame within {_SECONDS} s")
    found = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("frame ")]
    if result.returncode != 0 or not found:
        return Drawing(_cause(result))
    width, height, brightness, *rates = found[0]
    frame = f"frame {width}x{height} brightness {float(brightness):.1f}"
    if float(brightness) == 0:
        return Drawing(f"{frame}: all black")
    return Drawing("", frame, *map(float, rates))


def loads(library: str) -> bool:
    """Whether this machine has a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@functools.cache
def mujoco_renderer(python: str | None = None) -> str:
    """The ``MUJOCO_GL`` under which MuJoCo draws here: the user's own, ``egl`` or ``osmesa``.

    Where both libraries are there, EGL has to draw a frame to be chosen. ``disable`` where there is
    none: then MuJoCo simulates without pictures. What the user chose and is no renderer is told of.

    Args:
        python: Interpreter that has MuJoCo; None: this one.
    """
    if (chosen := os.environ.get("MUJOCO_GL", "")) in (*LIBRARIES, "glfw"):
        return chosen
    if chosen and chosen not in RENDERERS:
        why = f"it is no renderer; {did_you_mean(chosen, RENDERERS)}"
        log.warning("the shell's MUJOCO_GL=%s is not used: %s", chosen, why)
    there = [renderer for renderer, library in LIBRARIES.items() if loads(library)]
    if len(there) > 1 and draw(MUJOCO, "egl", python=python, size=32).fault:
        return "osmesa"
    return there[0] if there else "disable"


def _cause(result: subprocess.CompletedProcess[str]) -> str:
    """Return the line of the error output that says most: the last exception."""
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(" ")]
    raised = [line for line in lines if "Error" in line.partition(":")[0]]
    text = (raised or lines or [f"exit code {result.returncode}"])[-1]
    return text.strip()[:200]
