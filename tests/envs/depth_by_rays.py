"""What depth must be, by geometry: a ray through the middle of each pixel of a MuJoCo camera.

Runs under the interpreters of the simulators: it imports numpy and MuJoCo alone.
"""

from __future__ import annotations

import mujoco
import numpy as np

_DRAWN_GROUPS = np.array([1, 1, 1, 0, 0, 0], np.uint8)
"""Of geoms, as MuJoCo draws by default."""


def depth_by_rays(model, data, camera, size):
    """Distances [size, size] along the axis of the camera to what the rays hit first, infinite
    where they hit nothing; row 0 is the upper edge of the camera."""
    number = model.camera(camera).id
    focal = 0.5 * size / np.tan(np.deg2rad(model.cam_fovy[number]) / 2)
    rows, columns = (np.mgrid[:size, :size] + 0.5 - size / 2) / focal
    # A camera looks along -z, with x to the right and y upwards; a step along its axis is 1.
    rays = np.stack([columns, -rows, -np.ones_like(rows)], -1)
    rays = rays.reshape(-1, 3) @ data.cam_xmat[number].reshape(3, 3).T
    found, hit = np.full(len(rays), np.inf), np.zeros(1, np.int32)
    for place, ray in enumerate(rays):
        length = np.linalg.norm(ray)
        far = mujoco.mj_ray(
            model, data, data.cam_xpos[number], ray / length, _DRAWN_GROUPS, 1, -1, hit
        )
        if far >= 0:
            found[place] = far / length
    return found.reshape(size, size)


def share_within(depth, expected, tolerance):
    """Which share of the pixels whose ray hits something has the expected depth."""
    hits = np.isfinite(expected)
    return float((np.abs(depth - expected)[hits] <= tolerance).mean())
