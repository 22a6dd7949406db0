"""Whether the installed simulators can draw: one real offscreen frame of each, in its own process.

A renderer that is missing a library may end its process instead of raising, and the choice of the
renderer cannot be changed after the first import; hence a process per simulator and renderer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from rlinf.cli.health.packages import Finding, installed

_SECONDS = 120

_METAWORLD = """
import gymnasium, metaworld
env = gymnasium.make(
    "Meta-World/MT1", env_name="reach-v3", render_mode="rgb_array", disable_env_checker=True
)
"""
_CLASSIC_CONTROL = """
import gymnasium
env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
"""
_DRAW = """
import os, sys
env.reset(seed=0)
frame = env.render()
print(f"frame {frame.shape[1]}x{frame.shape[0]} brightness {float(frame.mean()):.1f}")
sys.stdout.flush()
os._exit(0)  # a renderer's destructors complain about a context that is already gone
"""

# Distribution that must be installed, program that builds the env, renderers in order of choice.
SIMULATORS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "metaworld": ("metaworld", _METAWORLD, ("egl", "osmesa")),
    "gymnasium classic control": ("pygame", _CLASSIC_CONTROL, ("software",)),
}

_SETTINGS = {
    "egl": {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"},
    "osmesa": {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"},
    "software": {"SDL_VIDEODRIVER": "dummy"},
}

_FIXES = {
    "egl": "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "apt-get install libosmesa6",
    "software": "pip install --force-reinstall pygame",
}


def rendering_findings() -> Iterator[Finding]:
    """Yield one finding per installed simulator and renderer.

    A simulator fails only if none of its renderers draws; a second renderer is a reserve.
    """
    for simulator, (distribution, program, renderers) in SIMULATORS.items():
        if not installed(distribution):
            yield Finding(f"render {simulator}", "absent", f"{distribution} is not installed")
            continue
        results = [draw(simulator, renderer, program) for renderer in renderers]
        one_works = any(result.status == "ok" for result in results)
        for result in results:
            if result.status == "failed" and one_works:
                yield Finding(
                    result.name, "warning", f"reserve renderer: {result.detail}", result.fix
                )
            else:
                yield result


def draw(simulator: str, renderer: str, program: str) -> Finding:
    """Draw one frame in a process of its own and look whether it shows anything.

    ``program`` leaves an env named ``env``.
    """
    name = f"render {simulator} ({renderer})"
    try:
        result = subprocess.run(
            [sys.executable, "-c", program + _DRAW],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**os.environ, **_SETTINGS[renderer]},
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "failed", f"no frame within {_SECONDS} s", _FIXES[renderer])
    frames = [line for line in result.stdout.splitlines() if line.startswith("frame ")]
    if result.returncode != 0 or not frames:
        return Finding(name, "failed", _cause(result), _FIXES[renderer])
    if float(frames[0].rpartition(" ")[2]) == 0:
        return Finding(name, "failed", f"{frames[0]}: all black", _FIXES[renderer])
    return Finding(name, "ok", frames[0])


def _cause(result: subprocess.CompletedProcess[str]) -> str:
    """Return the line of the error output that says most: the last exception."""
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(" ")]
    raised = [line for line in lines if "Error" in line.partition(":")[0]]
    text = (raised or lines or [f"exit code {result.returncode}"])[-1]
    return text.strip()[:200]
