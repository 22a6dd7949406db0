"""The next item of a channel, which may be asked for before it is there."""

from __future__ import annotations

from typing import Any

from rlinf.scheduler import Channel

_ANSWER_SECONDS = 0.0005
"""In which a channel of this process gives an item that it has. Who asks for one and does not wait
so long sees one item at a time, however many there are."""


class NextItem:
    """Looks whether a channel has an item, without waiting for one, and without losing it.

    Args:
        channel: Where items arrive, for this reader alone.
        queue: Of the channel; None: the one of messages that name none.
    """

    def __init__(self, channel: Channel, queue: int | None = None) -> None:
        self._channel = channel
        self._queue: dict[str, Any] = {} if queue is None else {"key": queue}
        self._asked: Any = None

    def arrived(self, within: float = 0.0) -> bool:
        """Whether :meth:`take` will not block.

        Args:
            within: Seconds to wait for the item.
        """
        if self._asked is None:
            self._asked = self._channel.get(**self._queue, async_op=True)
            within = max(within, _ANSWER_SECONDS)
        return bool(self._asked.done_within(within))

    def take(self) -> Any:
        """The item, waited for."""
        if self._asked is None:
            return self._channel.get(**self._queue)
        item, self._asked = self._asked.wait(), None
        return item

    def take_all(self) -> list[Any]:
        """All items that have arrived."""
        found = []
        while self.arrived():
            found.append(self.take())
        return found
