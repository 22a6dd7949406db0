"""Frames per second of the offscreen renderers on one scene: twelve boxes on a plane, one light.

    python benchmarks/renderers.py
    python benchmarks/renderers.py --sizes 64 224 --seconds 2 --turns 5

MuJoCo draws it by EGL and by OSMesa, SAPIEN by Vulkan, PyBullet by its TinyRenderer; each under an
interpreter that has it (`rlinf env install NAME`), in processes of their own, in turns, with
shadows (MuJoCo: and smooth edges) and without. Printed: frames per second by the clock, and by CPU
time of all threads of the process, as medians over the turns; or why there is no frame. Updates of
the scene are counted, physics is not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from rlinf.cli.health.rendering import interpreter_with
from rlinf.envs.renderers import MUJOCO, SAPIEN, draw

BULLET = """
import numpy, pybullet as p
p.connect(p.DIRECT)
def add(size, at, colour):
    shape = p.createVisualShape(p.GEOM_BOX, halfExtents=size, rgbaColor=colour)
    p.createMultiBody(0, -1, shape, at)
add([2, 2, .01], [0, 0, 0], [.5, .5, .5, 1])
for i in range(12): add([.1] * 3, [i % 4 * .3, i // 4 * .3, .1], [i / 12, .5, 1 - i / 12, 1])
view = p.computeViewMatrix([-1.5, .4, 1.2], [.4, .4, 0], [0, 0, 1])
projection = p.computeProjectionMatrixFOV(57, 1, .01, 10)
class Env:
    def reset(self, seed): pass
    def render(self):
        drawn = p.getCameraImage(SIZE, SIZE, view, projection, shadow=int(EFFECTS),
            renderer=p.ER_TINY_RENDERER, flags=p.ER_NO_SEGMENTATION_MASK)[2]
        return numpy.asarray(drawn, numpy.uint8).reshape(SIZE, SIZE, 4)[..., :3]
env = Env()
"""

RENDERERS = {
    "egl": ("mujoco", MUJOCO),
    "osmesa": ("mujoco", MUJOCO),
    "vulkan": ("sapien", SAPIEN),
    "software": ("pybullet", BULLET),
}
"""By what picks them: package, and program that draws."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="Pixels.")
    parser.add_argument("--seconds", type=float, default=1.0, help="Of every turn.")
    parser.add_argument("--turns", type=int, default=3, help="Turns of each renderer.")
    parser.add_argument("--json", help="File for the figures.")
    given = parser.parse_args()
    pythons = {module: interpreter_with(module) for module, _ in RENDERERS.values()}
    rows = []
    for size, effects in ((size, effects) for size in given.sizes for effects in (False, True)):
        turns = [
            {
                name: draw(
                    program, name, python=pythons[module], size=size, seconds=given.seconds,
                    effects=effects,
                )
                for name, (module, program) in RENDERERS.items()
                if pythons[module]
            }
            for _ in range(given.turns)
        ]  # fmt: skip
        for name, first in turns[0].items():
            clock, cpu = (
                statistics.median(getattr(turn[name], by) for turn in turns)
                for by in ("per_second", "per_cpu_second")
            )
            row = {"renderer": name, "package": RENDERERS[name][0], "size": size}
            rows.append({**row, "effects": effects, "per_second": clock, "per_cpu_second": cpu})
            found = first.fault or f"{clock:6.0f} frames/s, {cpu:6.0f} per CPU second"
            shown = "with shadows" if effects else "without"
            print(f"{row['package']:9s} {name:9s} {size:4d}  {shown:13s} {found}", flush=True)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
