"""What a sandboxed program may use, and how its run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlinf.errors import RLinfError

Ending = Literal["exited", "signalled", "cpu_time", "wall_time", "memory", "output", "stopped"]
"""How a program ended: by itself, by a signal, over one of its limits, or because the host had what
it wanted."""


class SandboxError(RLinfError):
    """The sandbox could not be built; nothing has been run."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use.

    Args:
        cpu_seconds: Processor time of each of its processes.
        wall_seconds: Time from its start, that of the sandbox included.
        memory_bytes: Address space of each process, and resident memory of all together.
        processes: Processes and threads at a time.
        scratch_bytes: All files in the scratch directory together.
        output_bytes: Standard output and standard error, each.
        descriptors: Open files of each process.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    processes: int = 16
    scratch_bytes: int = 16 * 2**20
    output_bytes: int = 2**20
    descriptors: int = 64

    def of_kernel(self) -> dict[str, int]:
        """The limits that the kernel keeps for each process, by their name in ``resource``."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.processes + 1,  # the first process of the namespace counts
            "RLIMIT_FSIZE": self.scratch_bytes,
            "RLIMIT_NOFILE": self.descriptors,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How the run of a program ended.

    Args:
        ending: How.
        code: Exit code; minus the number of the signal that ended it; None where the host did.
        output: Standard output, cut at the limit.
        errors: Standard error, cut at the limit.
        seconds: Time from its start.
    """

    ending: Ending
    code: int | None
    output: bytes
    errors: bytes
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0; says nothing about what it did."""
        return self.ending == "exited" and self.code == 0
