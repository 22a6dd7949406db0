"""An env process: builds envs, then obeys the vector env that started it.

Imports the standard library, numpy, gymnasium and the simulator; nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import traceback
from typing import Any

from rlinf.child_process import watch_parent
from rlinf.envs.base import SimulatorEnv
from rlinf.envs.block import SharedBlock, block_fields
from rlinf.envs.host import EnvHost, EpisodeRules
from rlinf.envs.registry import REGISTRY
from rlinf.envs.schedule import EpisodeSchedule
from rlinf.envs.spec import spec_of
from rlinf.envs.wire import Message, Op, decode_tree, encode_tree, receive, send
from rlinf.errors import ConfigError, MissingPackageError, UserError


def main(lifeline: int, commands: int, memory: int) -> None:
    """Serve one vector env until it says CLOSE or goes away.

    Args:
        lifeline: See :func:`~rlinf.child_process.watch_parent`.
        commands: Descriptor of the socket to the vector env.
        memory: Descriptor of the shared memory.
    """
    watch_parent(lifeline)
    _yield_to_the_sender()
    with socket.socket(fileno=commands) as connection:
        try:
            _serve(connection, memory)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent is gone


def _yield_to_the_sender() -> None:
    """Never take the core of the process that sends a command, before it has sent the others.

    The first process that is woken would otherwise run there for a slice of some milliseconds,
    while its siblings still wait for their commands.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _serve(connection: socket.socket, memory: int) -> None:
    server = _Server(memory)
    while True:
        message = receive(connection)
        try:
            payload = server.answer(message)
        except Exception as error:  # noqa: BLE001 - the parent decides; this process only reports
            send(connection, Message(Op.ERROR, message.stage, 0, message.sequence, _report(error)))
            continue
        send(connection, Message(Op.DONE, message.stage, 0, message.sequence, payload))
        if message.op == Op.CLOSE:
            return


def _report(error: Exception) -> bytes:
    report: dict[str, Any] = {"kind": "failure"}
    if isinstance(error, MissingPackageError):
        package = [error.package, error.extra, error.needed_for]
        report = {"kind": "missing", "package": package}
    elif isinstance(error, ConfigError):
        report = {"kind": "user", "message": error.reason, "key": error.key}
    elif isinstance(error, UserError):
        report = {"kind": "user", "message": str(error), "key": ""}
    report["stack"] = "".join(traceback.format_exception(error))
    return encode_tree(report)


class _Server:
    """What the process knows between two commands."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._settings: dict[str, Any] = {}
        self._envs: dict[int, SimulatorEnv] = {}
        self._host: EnvHost | None = None

    def answer(self, message: Message) -> bytes:
        """Execute one command and return the content of its answer."""
        if message.op == Op.START:
            return encode_tree(self._start(decode_tree(message.payload)))
        if message.op == Op.ATTACH:
            return self._attach()
        host = self._host
        if host is None:
            if message.op == Op.CLOSE:
                return b""
            raise RuntimeError("a command came before ATTACH")
        rows = self._settings["rows"][message.stage] if message.stage >= 0 else list(self._envs)
        if message.op == Op.STEP:
            host.step(rows, message.sequence, message.chunk)
        elif message.op == Op.RESET:
            host.reset(rows, message.sequence)
        elif message.op == Op.RESTORE:
            host.restore(decode_tree(message.payload))
        elif message.op == Op.SCHEDULE:
            host.schedule = EpisodeSchedule(**decode_tree(message.payload))
        elif message.op == Op.STATE:
            return encode_tree(host.states(rows))
        elif message.op == Op.RENDER:
            return encode_tree({"frame": host.render(message.chunk)})
        elif message.op == Op.CLOSE:
            host.close()
        faults = host.take_faults()
        return encode_tree({"faults": faults}) if faults else b""

    def _start(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Build the envs and say what they look like."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, settings["affinity"])
        self._settings = settings
        # The row of an env that is being built, for the message when that takes too long.
        rows = [row for stage in settings["rows"] for row in stage]
        first = self._make()
        self._spec = spec_of(first, settings["rules"]["max_episode_steps"])
        self._envs = {row: self._make() if position else first for position, row in enumerate(rows)}
        gc.collect()
        gc.freeze()
        return {"spec": self._spec.to_json(), "pid": os.getpid()}

    def _make(self) -> SimulatorEnv:
        kind, steps = self._settings["type"], self._settings["rules"]["max_episode_steps"]
        adapter = REGISTRY.load(kind)
        options = adapter.Options(**self._settings["options"])
        adapter.check(options, steps)
        return adapter(options)

    def _attach(self) -> bytes:
        settings = self._settings
        fields = block_fields(
            self._spec, settings["num_envs"], settings["max_chunk"], settings["processes"]
        )
        block = SharedBlock(self._memory, fields)
        self._host = EnvHost(
            make=self._make,
            envs=self._envs,
            spec=self._spec,
            block=block,
            rules=EpisodeRules(**settings["rules"]),
            schedule=EpisodeSchedule(**settings["schedule"]),
            first_env=settings["first_env"],
            progress=block["progress"][settings["process"]],
        )
        return b""
