"""One model of MuJoCo for all envs of a process.

A model with meshes takes tens of megabytes. Envs that step in turn, each on a model of its own,
drive those of the others out of the processor's caches: eight xArms on one core made two thirds of
the steps of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Dict  # noqa: UP035 - the env side runs under 3.8 as well

_compiled: Dict[Any, Any] = {}  # noqa: UP006


@contextlib.contextmanager
def shared_models() -> Iterator[None]:
    """Within it, what MuJoCo compiles a second time is the model that it compiled before.

    For tasks that never write into their model what an episode of another env must not see.
    """
    import mujoco

    kinds = ("from_xml_path", "from_xml_string")
    originals = {kind: getattr(mujoco.MjModel, kind) for kind in kinds}
    for kind, original in originals.items():
        setattr(mujoco.MjModel, kind, staticmethod(_once(original)))
    try:
        yield
    finally:
        for kind, original in originals.items():
            setattr(mujoco.MjModel, kind, staticmethod(original))


def _once(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(xml: str, assets: Any = None) -> Any:
        key = (xml, *sorted((assets or {}).items()))
        if key not in _compiled:
            _compiled[key] = compile_model(xml, assets or {})
        return _compiled[key]

    return compiled
