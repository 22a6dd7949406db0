"""A placement under which a run could not go on."""

from __future__ import annotations

from rlinf.errors import RunFailure


class SwitchFailure(RunFailure):
    """The run goes on under the placement that it had.

    Args:
        cause: What went wrong.
        seconds: What trying, and going back, took.
    """

    def __init__(self, cause: Exception, seconds: float) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.seconds = seconds
