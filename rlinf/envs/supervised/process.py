"""An env process: builds envs, then obeys the vector env that started it.

Imports the standard library, numpy, gymnasium and the simulator; nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

from rlinf.envs.base import REGISTRY, Simulator, SimulatorBatch, SimulatorEnv, importing
from rlinf.envs.spec import spec_of
from rlinf.envs.supervised.batch_host import BatchHost
from rlinf.envs.supervised.block import block_fields
from rlinf.envs.supervised.host import EnvHost
from rlinf.envs.supervised.schedule import EpisodeRules
from rlinf.envs.supervised.successive import successive
from rlinf.errors import RunFailure
from rlinf.processes.child import CLOSE, serve
from rlinf.processes.shared_block import SharedBlock


def main(lifeline: int, commands: int, memory: int) -> None:
    """Serve one vector env until it says ``close`` or goes away; all are file descriptors."""
    # Never take the core of the process that sends a command before it has sent the others: the
    # first that is woken would run there for some milliseconds, while its siblings still wait.
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    serve(lifeline, commands, _Server(memory).answer)


class _Server:
    """What the process knows between two commands."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._settings: dict[str, Any] = {}
        self._adapter: Any = None
        self._envs: dict[int, SimulatorEnv] = {}
        self._batches: list[SimulatorBatch] = []
        self._host: EnvHost | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Execute one command and return the content of its answer."""
        try:
            return self._answer(message)
        except RunFailure as error:  # of a known kind: its message says all
            return {"failure": str(error)}

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        operation = message["operation"]
        if operation == "start":
            with importing(message["type"], message["remedy"]):
                return self._start(message)
        if operation == "attach":
            return self._attach()
        host = self._host
        if host is None:
            if operation == CLOSE:
                return {}
            raise RuntimeError("a command came before `attach`")
        found = self._executed(host, operation, message)
        return {**found, "stage": message.get("stage", -1), **host.take_report()}

    def _executed(self, host: EnvHost, operation: str, message: dict[str, Any]) -> dict[str, Any]:
        if operation == "step":
            rows = self._settings["rows"][message["stage"]]
            host.step(rows, message["sequence"], message["chunk"])
            if states := host.take_states():
                return {"states": states}
        elif operation == "reset":
            host.reset(self._settings["rows"][message["stage"]], message["sequence"])
        elif operation == "restore":
            host.restore(message["rows"])
        elif operation == "schedule":
            host.schedule(EpisodeRules(**message["rules"]))
        elif operation == "state":
            return {"states": host.states([row for part in self._settings["rows"] for row in part])}
        elif operation == "render":
            return {"frame": host.render(message["row"])}
        elif operation == CLOSE:
            host.close()
        return {}

    def _start(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the envs and say what they look like."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, settings["affinity"])
        self._settings = settings
        rows = [row for stage in settings["rows"] for row in stage]
        adapter = REGISTRY.load(settings["type"])
        if issubclass(adapter, SimulatorEnv):
            adapter = successive(adapter, settings["observation_steps"])
        self._adapter = adapter
        first: Simulator
        if issubclass(adapter, SimulatorBatch):
            self._batches = [self._make_batch(len(stage)) for stage in settings["rows"]]
            first = self._batches[0]
        else:
            self._envs = {row: self._make() for row in rows}
            first = self._envs[rows[0]]
        self._spec = spec_of(first, settings["rules"]["max_episode_steps"])
        gc.collect()
        gc.freeze()
        repeats = {name: getattr(first, name) for name in ("deterministic", "replayable")}
        return {"spec": self._spec.to_json(), "repeats": repeats}

    def _make(self) -> SimulatorEnv:
        env: SimulatorEnv = self._adapter(self._checked_options())
        return env

    def _make_batch(self, num_envs: int) -> SimulatorBatch:
        batch: SimulatorBatch = self._adapter(self._checked_options(), num_envs)
        return batch

    def _checked_options(self) -> Any:
        options = self._adapter.Options(**self._settings["options"])
        self._adapter.check(options, self._settings["rules"]["max_episode_steps"])
        return options

    def _attach(self) -> dict[str, Any]:
        settings = self._settings
        fields = block_fields(
            self._spec, settings["num_envs"], settings["max_chunk"], settings["processes"]
        )
        block = SharedBlock(self._memory, fields)
        shared = {
            "spec": self._spec,
            "block": block,
            "rules": EpisodeRules(**settings["rules"]),
            "numbers": settings["numbers"],
            "progress": block["progress"][settings["process"]],
            "rows": [row for stage in settings["rows"] for row in stage],
        }
        if self._batches:
            self._host = BatchHost(
                make_batch=self._make_batch,
                batches=self._batches,
                stages=settings["rows"],
                **shared,
            )
        else:
            self._host = EnvHost(make=self._make, envs=self._envs, **shared)
        return {}
