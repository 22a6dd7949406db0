"""The exceptions of the scheduler.

Each is one of the project's own, and a builtin that published programs catch for that mistake.
"""

from __future__ import annotations

from rlinf.errors import ConfigError, RLinfError, UserError


class SchedulerError(RLinfError):
    """Base of what goes wrong between workers while a program runs."""


class NameTakenError(SchedulerError, ValueError):
    """A worker group or channel of that name is already alive."""


class WaitTimeout(SchedulerError, TimeoutError):  # noqa: N818 - reads as what happened
    """A receive, a channel get or a collective waited longer than the deadline."""


class WithdrawnError(SchedulerError):
    """What was asked for does not come any more: the wait for it was given up before."""


class WorkerDiedError(SchedulerError, RuntimeError):
    """A worker's process ended while others still needed it."""


class WorkerCallError(SchedulerError, RuntimeError):
    """A method of a worker raised; the worker's own exception is the ``__cause__``.

    Args:
        message: What the caller reads: worker, method and the exception in one line.
        worker_name: Address of the worker, ``group:rank``.
        method: Name of the method that raised.
        remote_traceback: Formatted traceback as seen inside the worker.
    """

    def __init__(
        self, message: str, worker_name: str = "", method: str = "", remote_traceback: str = ""
    ) -> None:
        # Not super(): that may be the type of the own exception, with arguments of its own.
        RuntimeError.__init__(self, message)
        self.message = message
        self.worker_name = worker_name
        self.method = method
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        if not self.remote_traceback:
            return self.message
        return f"{self.message}\n\nTraceback inside {self.worker_name}:\n{self.remote_traceback}"

    def __reduce__(self) -> tuple[type[WorkerCallError], tuple[str, str, str, str]]:
        return type(self), (self.message, self.worker_name, self.method, self.remote_traceback)


class SchedulerUsageError(UserError, RuntimeError):
    """A call that is not possible in this place, such as a Worker built without a launch."""


class LocalChannelError(UserError, AssertionError):
    """Something that a channel of one process alone does not do."""


class SchedulerValueError(UserError, ValueError):
    """An argument of a scheduler call that is not legal."""


class SchedulerTypeError(UserError, TypeError):
    """An argument of a scheduler call that is of the wrong type."""


class InvalidRankError(UserError, AssertionError):
    """A rank that the worker group does not have."""


class AddressError(UserError, AssertionError, ValueError):
    """A worker name that cannot be an address."""


class RoutingError(UserError, AssertionError):
    """Batch and world sizes, or ranks, that cannot be routed to each other."""


class BatchError(UserError, ValueError):
    """A payload that cannot be split, merged or counted along its batch dimension."""


class HardwareError(UserError, ValueError):
    """Hardware that is unknown, absent, or cannot be divided as asked."""


class PlacementError(UserError, AssertionError):
    """A placement that the cluster cannot provide or that contradicts itself."""


class PlacementSyntaxError(PlacementError, ValueError):
    """Text that is not of the placement grammar."""


class PlacementModeError(PlacementError, ValueError):
    """Components placed so that no execution mode of theirs fits."""


class NodeRankError(UserError, IndexError):
    """A node rank that the selected node groups do not have."""


class ClusterConfigError(ConfigError, AssertionError):
    """A cluster configuration with a missing, unknown or contradictory entry."""


class ClusterConfigValueError(ClusterConfigError, ValueError):
    """A cluster configuration with a value of which no such thing is known."""
