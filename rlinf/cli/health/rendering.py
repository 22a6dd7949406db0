"""Whether the simulators can draw: a real frame by each renderer, and which one they will use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from rlinf.cli.health.packages import Finding
from rlinf.envs import renderers
from rlinf.envs.base import ADAPTERS
from rlinf.envs.installation import State, existing, status

_SECONDS_OF_DRAWING = 0.5

_CLASSIC_CONTROL = """
import gymnasium
env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
"""

# Module that draws, program that builds the env, renderers in order of choice.
SIMULATORS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mujoco": ("mujoco", renderers.MUJOCO, ("egl", "osmesa")),
    "sapien": ("sapien", renderers.SAPIEN, ("vulkan",)),
    "gymnasium classic control": ("pygame", _CLASSIC_CONTROL, ("software",)),
}

_FIXES = {
    "egl": "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri",
    "osmesa": "apt-get install libosmesa6",
    "software": "pip install --force-reinstall pygame",
    "vulkan": "the driver of the GPU, or Mesa 24.3 or newer (Debian 12: apt-get install -t "
    "bookworm-backports mesa-vulkan-drivers); without it ManiSkill gives states alone",
}


def rendering_findings() -> Iterator[Finding]:
    """Yield one finding per simulator's renderer, and what MuJoCo's env processes will use.

    A simulator fails only if none of its renderers draws; a second renderer is a reserve. SAPIEN
    simulates without any.
    """
    for simulator, (module, program, names) in SIMULATORS.items():
        python = interpreter_with(module)
        if python is None:
            yield Finding(f"render {simulator}", "absent", f"{module} is not installed")
            continue
        results = [draw(simulator, name, program, python) for name in names]
        needed = simulator != "sapien" and all(result.status == "failed" for result in results)
        for result in results:
            if result.status == "failed" and not needed:
                yield Finding(result.name, "warning", result.detail, result.fix)
            else:
                yield result
        if simulator == "mujoco":
            yield _choice(python, [result.status == "ok" for result in results])


def draw(simulator: str, renderer: str, program: str, python: str = sys.executable) -> Finding:
    """Draw in a process of its own and say how quickly, or why not."""
    name = f"render {simulator} ({renderer})"
    found = renderers.draw(program, renderer, python=python, seconds=_SECONDS_OF_DRAWING)
    if found.fault:
        return Finding(name, "failed", found.fault, _FIXES[renderer])
    return Finding(name, "ok", f"{found.frame}, {found.per_second:.0f} frames/s")


def _choice(python: str, works: list[bool]) -> Finding:
    """What env processes are given as ``MUJOCO_GL``, and whether that draws."""
    chosen, drawing = (
        renderers.mujoco_renderer(python),
        dict(zip(("egl", "osmesa"), works, strict=True)),
    )
    if drawing.get(chosen, not any(works)):
        return Finding("MUJOCO_GL", "ok", f"{chosen}, for every env process")
    other = next((renderer for renderer, draws in drawing.items() if draws), "")
    fix = f"export MUJOCO_GL={other}" if other else ""
    return Finding("MUJOCO_GL", "warning", f"{chosen}, which does not draw", fix)


def interpreter_with(module: str) -> str | None:
    """This interpreter, or that of an installed simulator, which has a module."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    places = (f"*/lib/python*/site-packages/{name}" for name in (module, f"{module}.*.so"))
    for package in sorted(found for place in places for found in existing(place)):
        directory = package.parents[3]
        if directory.name in ADAPTERS and status(directory.name).state is State.READY:
            return str(directory / "bin" / "python")
    return None
