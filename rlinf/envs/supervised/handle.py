"""One env process, as its parent sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from rlinf.envs.spec import EnvSpec
from rlinf.errors import RunFailure, own_line
from rlinf.processes.child import ProcessLostError, RefusedValueError, SupervisedProcess

_CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class Command:
    """What the envs of a stage are to do."""

    operation: str
    """``reset`` or ``step``."""
    stage: int
    chunk: int
    """Primitive steps."""
    sequence: int
    """Number of the command; rows remember the last one that they have completed."""


@dataclass(frozen=True)
class ProcessLimits:
    """Under which interpreter (None: this one), with which environment variables and how much
    resident memory (bytes; None: any) an env process runs, what it may have from its siblings (see
    :class:`SupervisedProcess`), and how long it may take."""

    python: str | None
    environment: Mapping[str, str]
    imported: Sequence[str] | None
    memory: int | None
    step_deadline: float
    start_deadline: float


class EnvProcess:
    """One env process and what is in flight there; settings as in ``process.py``."""

    def __init__(self, settings: Mapping[str, Any], memory: int, limits: ProcessLimits) -> None:
        self._limits = limits
        self.progress: np.ndarray | None = None
        self.pending: dict[int, Command] = {}
        self.repeats: dict[str, bool] = {}
        self.process = SupervisedProcess(
            "rlinf.envs.supervised.process",
            settings,
            descriptors=[memory],
            environment=limits.environment,
            python=limits.python,
            imported=limits.imported,
        )

    def started(self) -> EnvSpec:
        """Wait until the envs are built and return what they look like.

        Raises:
            ConfigError: The options are not legal for the simulator.
            MissingPackageError: The simulator is not installed under this interpreter.
            ProcessLostError: The process ended.
            RunFailure: The process failed or took too long.
        """
        try:
            found = self._receive(self._limits.start_deadline)
        except ProcessLostError as lost:
            if lost.reason == "hang":
                raise RunFailure(
                    f"an env process was not ready after {self._limits.start_deadline:g} s "
                    f"(start_deadline); its stack and output:\n{lost.detail}"
                ) from lost
            raise
        self.repeats = found["repeats"]
        return EnvSpec.from_json(found["spec"])

    def send(self, command: Command) -> None:
        """Send the command of a stage; it is in flight until :meth:`collect` has its answer.

        Raises:
            ProcessLostError: The process ended.
        """
        self.pending[command.stage] = command
        self.process.send(**vars(command))

    def collect(self) -> dict[str, Any]:
        """Wait for the next answer to a command of a stage and return it, with what it reports.

        Raises:
            ProcessLostError: The process ended, or no step ended within the deadline.
            RunFailure: The process reports that it cannot go on.
        """
        answer = self._receive(self._limits.step_deadline)
        del self.pending[answer["stage"]]
        return answer

    def ask(self, operation: str, **content: Any) -> dict[str, Any]:
        """The answer to a command outside of the stages; raises as :meth:`collect`."""
        self.order(operation, **content)
        return self.answer()

    def order(self, operation: str, **content: Any) -> None:
        """Send a command outside of the stages, none of which may be in flight.

        Raises:
            ProcessLostError: The process ended.
        """
        self.process.send(operation, **content)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to :meth:`order`; raises as :meth:`collect`."""
        return self._receive(self._limits.step_deadline)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            answer = self.process.receive(seconds, progress=self._ticks)
        except RefusedValueError as error:
            raise RunFailure(_failed(error.stack)) from error
        except ProcessLostError as lost:
            if lost.reason == "exception":
                raise RunFailure(_failed(lost.detail)) from lost
            if lost.reason == "hang" and self.progress is not None:
                stacks = lost.detail.partition("\n")[2]
                detail = f"no step ended within {seconds:g} s\n{stacks}"
                raise ProcessLostError("hang", detail) from lost
            raise
        if "failure" in answer:
            raise RunFailure(answer["failure"])
        return answer

    def memory(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def _ticks(self) -> int:
        return -1 if self.progress is None else int(self.progress[1])

    def begin_close(self) -> None:
        """Let the process begin to close its envs; :meth:`close` waits for it."""
        if not self.pending:
            self.process.begin_close(_CLOSE_SECONDS)

    def close(self) -> None:
        """Let the process close its envs, then end it."""
        if self.pending:
            self.process.kill()
        else:
            self.process.close(_CLOSE_SECONDS)


def _failed(stack: str) -> str:
    """What was raised, and where: a line of the user's own code, or else the whole stack, as a
    screen may show the first line alone."""
    lines = stack.rstrip().splitlines()
    own = own_line(lines)
    raised = f"an env process failed: {' '.join(lines[-1:])}{own}"
    return raised if own else f"{raised}\n{stack}"
