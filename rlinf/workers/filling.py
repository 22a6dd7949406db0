"""Fills the positions of a step: one loop for all ways in which groups get a position."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest
from rlinf.flow.stream import Emit, InputStream
from rlinf.workers.global_batches import LengthBounds
from rlinf.workers.group_book import GroupBook, PositionBook

_SHARE = 0.02
"""Part of the time that reports of progress may take; all who hear one need about as long again."""
_PAUSE = 0.05
"""Most seconds between two of them."""
_AT_FIRST = 4
"""Factor on the pause while no own group is complete: little could be trained on or decided."""


class RolloutHook(Protocol):
    """Acts beside the generation of one step: may take requests away, and bring some."""

    @property
    def goes_on(self) -> bool:
        """Whether groups may still come when all own positions are filled."""

    @property
    def idle_seconds(self) -> float:
        """Between two looks for scores while nothing is generated."""

    def before_step(self) -> None:
        """Called before each step of the engine, and each look where it has nothing to do."""

    def after_step(self, ended: Sequence[FinishedCompletion]) -> None:
        """Called after each step of the engine that had something to do."""

    def tell(self, bounds: Mapping[int, int]) -> None:
        """Called with :meth:`PositionBook.bounds` where progress is reported."""

    def exchange(self) -> Iterator[Emit]:
        """Take requests away, or bring some."""

    def end(self) -> None:
        """Called when the step has ended here."""


class DeviceSharing(Protocol):
    """What an argument of a stage tells of devices that rollout and trainer share."""

    def begin(
        self,
        former: RolloutHook | None,
        *,
        engine: Engine,
        book: PositionBook,
        step: int,
        rank: int,
        release: Callable[[], None],
    ) -> RolloutHook:
        """Get this worker's device; returns what acts in the step. ``former`` did in the one
        before."""


class Filling:
    """Generates the groups of one step, in an idle engine, until every position has one."""

    def __init__(
        self,
        book: GroupBook,
        engine: Engine,
        hook: RolloutHook | None = None,
        tells_progress: bool = False,
    ) -> None:
        self._book, self._engine, self._hook = book, engine, hook
        self._tells_progress = tells_progress
        self._told, self._pause = time.perf_counter(), 0.0

    def run(
        self, requests: Iterable[GenerationRequest], scored: InputStream
    ) -> Generator[Emit, None, None]:
        """Complete groups on the edge ``completions``; on ``groups`` those that fill a position."""
        book, engine, hook = self._book, self._engine, self._hook
        self._submit(requests)
        yield from self._filled()
        while book.unfilled or (hook is not None and hook.goes_on):
            yield from self._step()
            yield from self._take_scores(scored)
            yield from self._report()
            if hook is not None:
                yield from hook.exchange()
        # An engine that generates between the steps may have completed groups since the last one.
        if engine.unfinished:
            yield from self._emit(engine.abort())
            while book.awaits_scores:
                book.score(next(scored).payload)
        book.report.carried = len(book)
        if hook is not None:
            hook.end()

    def _step(self) -> Iterator[Emit]:
        if self._hook is not None:
            self._hook.before_step()
        if not self._engine.unfinished:
            if self._hook is None and not self._book.awaits_scores:
                raise RuntimeError(
                    f"{len(self._book)} groups do not fill the positions of the step"
                )
            return
        ended = self._engine.step()
        yield from self._emit(ended)
        if self._hook is not None:
            self._hook.after_step(ended)

    def _emit(self, ended: Iterable[FinishedCompletion]) -> Iterator[Emit]:
        for group in self._book.take(ended):
            yield Emit("completions", self._book.source(group.draw), group)

    def _take_scores(self, scored: InputStream) -> Iterator[Emit]:
        book, idle, hook = self._book, not self._engine.unfinished, self._hook
        # With a hook there is more to wait for than scores.
        pause = hook.idle_seconds if hook is not None and idle else 0.0
        waits = hook is None and book.waits(idle=idle)
        while book.awaits_scores and (waits or scored.ready(pause)):
            pause = 0.0
            self._submit(book.score(next(scored).payload))
            yield from self._filled()
            waits = hook is None and book.waits(idle=not self._engine.unfinished)
        if pause and not book.awaits_scores:
            time.sleep(pause)

    def _filled(self) -> Iterator[Emit]:
        for position, group in self._book.filled():
            yield Emit("groups", position, group)

    def _report(self) -> Iterator[Emit]:
        """Tell how long unfinished answers are at least, so often that it costs little."""
        book, begin = self._book, time.perf_counter()
        if not self._tells_progress or not isinstance(book, PositionBook):
            return
        pause = self._pause if book.complete else _AT_FIRST * self._pause
        if self._engine.unfinished and begin - self._told < pause:
            return
        yield from bounds_told(book, self._engine, self._hook)
        self._told = time.perf_counter()
        self._pause = min((self._told - begin) / _SHARE, _PAUSE)

    def _submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._engine.submit(request)


def bounds_told(book: PositionBook, engine: Engine, hook: RolloutHook | None) -> Iterator[Emit]:
    """Tell trainer and hook the least of unfinished answers; see :meth:`PositionBook.bounds`."""
    bounds = book.bounds(engine.progress()) if engine.unfinished else {}
    if bounds:
        yield Emit("groups", min(bounds), LengthBounds(tuple(bounds.items())))
    if hook is not None:
        hook.tell(bounds)
