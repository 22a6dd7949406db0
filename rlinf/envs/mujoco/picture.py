"""Offscreen pictures of a MuJoCo model without the effects that software renderers are slow at."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np

from rlinf.envs.observation_names import depth_of
from rlinf.errors import RunFailure

_BACKENDS = ("egl", "osmesa", "glfw")
_MAX_GEOMS = 2000


class Painter:
    """Draws the data of one model; opens its graphics context at the first picture.

    Shadows, reflections, sky and multisampling are off: on a software renderer that is fourteen
    times faster; ``effects`` are for policies that were trained on pictures with them. All envs of
    a process share the context, which is as large as the largest picture.
    """

    def __init__(self, model: Any, *, effects: bool = False) -> None:
        self._model, self._effects = model, effects
        self._size = 0
        self._window: Any = None
        self._context: Any = None

    def paint(self, data: Any, camera: str, size: int) -> np.ndarray:
        """Return the view of ``camera``, uint8 [size, size, 3]."""
        return self._drawn(data, camera, size, None)

    def observations(
        self, data: Any, cameras: Mapping[str, str], size: int, *, depth: bool
    ) -> dict[str, np.ndarray]:
        """Return the view of each camera by the key of its picture, and, where ``depth`` is shown,
        beside it how far off what each pixel shows is, float32 [size, size] in metres along the
        axis of the camera; where it shows nothing, the distance of the far clipping plane."""
        shown: dict[str, np.ndarray] = {}
        for key, camera in cameras.items():
            raw = np.zeros((size, size), np.float32) if depth else None
            shown[key] = self._drawn(data, camera, size, raw)
            if raw is not None:
                shown[depth_of(key)] = self._metres(raw)
        return shown

    def _metres(self, raw: np.ndarray) -> np.ndarray:
        """Distances of what the depth buffer holds: 1 at the near clipping plane, 0 at the far one,
        and linear in 1 / distance between them, as in every perspective projection."""
        scale, extent = self._model.vis.map, self._model.stat.extent
        nearest, farthest = 1.0 / (scale.znear * extent), 1.0 / (scale.zfar * extent)
        inverse = farthest + raw.astype(np.float64) * (nearest - farthest)
        metres: np.ndarray = (1.0 / inverse).astype(np.float32)
        return metres

    def _drawn(self, data: Any, camera: str, size: int, depth: np.ndarray | None) -> np.ndarray:
        """The picture; the depth buffer is put into ``depth``, where that is wanted."""
        self._prepare(size)
        model, scene = self._model, self._scene
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = model.camera(camera).id
        mujoco.mjv_updateScene(
            model, data, self._option, None, view, mujoco.mjtCatBit.mjCAT_ALL, scene
        )
        rectangle = mujoco.MjrRect(0, 0, size, size)
        picture = np.zeros((size, size, 3), np.uint8)
        mujoco.mjr_render(rectangle, scene, self._context)
        if depth is not None:
            # As it is stored: 1 minus that would lose its last bits. MuJoCo 2 has no such setting.
            self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        mujoco.mjr_readPixels(picture, depth, rectangle, self._context)
        if error := mujoco.mjr_getError():
            raise RuntimeError(f"the renderer is lost: OpenGL error {error:#x}")
        # OpenGL counts rows from below. A camera that stands still may have its upper edge below,
        # as MetaWorld's do.
        stands_still = model.cam_bodyid[view.fixedcamid] == 0
        on_its_head = stands_still and data.cam_xmat[view.fixedcamid].reshape(3, 3)[2, 1] < -0.1
        turn = np.s_[:, ::-1] if on_its_head else np.s_[::-1]
        if depth is not None:
            depth[:] = depth[turn].copy()
        return np.ascontiguousarray(picture[turn])

    def close(self) -> None:
        """Give the graphics context back."""
        if self._window is not None:
            atexit.unregister(self.close)
            self._window.make_current()  # what is freed is that of the current context
            if self._context is not None:
                self._context.free()
            self._window.free()
            self._window, self._context, self._size = None, None, 0

    def _prepare(self, size: int) -> None:
        if size <= self._size:
            self._window.make_current()
            return
        model = self._model
        if not self._effects:
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self.close()
        self._window = open_window(size)
        # While the graphics library still works; a destructor would come too late.
        atexit.register(self.close)
        self._window.make_current()
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        for flag in () if self._effects else ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, flag)] = 0
        self._option = mujoco.MjvOption()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._size = size


_SHARED: dict[tuple[int, bool], Painter] = {}


def shared_painter(model: Any, *, effects: bool = False) -> Painter:
    """The one painter of this process for a model that its envs share, which stays until the end.

    Whichever closes it gives the graphics context back, which the next picture opens again.
    """
    return _SHARED.setdefault((id(model), effects), Painter(model, effects=effects))


def open_window(size: int) -> Any:
    """Return an offscreen OpenGL context of ``size`` pixels, by the first backend that works.

    ``MUJOCO_GL`` (egl, osmesa or glfw) picks one.

    Raises:
        RunFailure: None works; the message says why each did not.
    """
    chosen = os.environ.get("MUJOCO_GL", "")
    failures = []
    for name in (chosen,) if chosen in _BACKENDS else _BACKENDS:
        try:
            return importlib.import_module(f"mujoco.{name}").GLContext(size, size)
        except (ImportError, AttributeError, RuntimeError, OSError) as error:
            failures.append(f"{name}: {error}")
            _forget_opengl()
    raise RunFailure(
        "no offscreen renderer works, so no picture can be drawn. Install one, for example "
        f"`apt-get install libegl1 libosmesa6`. {'; '.join(failures)}"
    )


def _forget_opengl() -> None:
    """Let PyOpenGL be imported anew: it is tied to the platform that did not work."""
    os.environ.pop("PYOPENGL_PLATFORM", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "OpenGL"]:
        del sys.modules[name]
