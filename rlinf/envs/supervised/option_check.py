"""A child process that judges the options of an env under the interpreter that will run it."""

from __future__ import annotations

from typing import Any

from rlinf.envs.base import REGISTRY, importing
from rlinf.processes.child import serve


def main(lifeline: int, commands: int) -> None:
    """Answer one question; see :func:`~rlinf.processes.child.serve`."""
    serve(lifeline, commands, _judge)


def _judge(message: dict[str, Any]) -> dict[str, Any]:
    """Let the adapter check its options; what it raises is the answer."""
    if message["operation"] == "start":
        with importing(message["type"], message["remedy"]):
            adapter = REGISTRY.load(message["type"])
            adapter.check(adapter.Options(**message["options"]), message["max_episode_steps"])
    return {}
