"""A partial rollout: the slots of a step are filled, and what is not complete then goes on later.

Oversampling keeps the engine busy while the last answers of a step would be waited for, as in
APRIL (Zhou et al. 2025); interrupted answers go on under newer weights, as in Kimi k1.5 (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from rlinf.data.sequences import PromptGroup
from rlinf.engines.protocol import Engine
from rlinf.flow.stream import Emit, InputStream, Item
from rlinf.workers.generation_round import Drawn, GenerationReport
from rlinf.workers.group_pool import GroupPool, OpenGroup


def fill_from_pool(
    pool: GroupPool,
    engine: Engine,
    scored: InputStream,
    *,
    slots: range,
    step: int,
    prompts: Sequence[Drawn],
    spares: Sequence[Drawn],
    worth: Callable[[PromptGroup], bool],
) -> Generator[Emit, None, GenerationReport]:
    """Fill slots with the groups that are complete first, then interrupt the others.

    Slots are filled in the order in which groups were complete, and scores are looked at only when
    as many are complete as there are slots to fill, so that the speed of the reward changes
    nothing.

    Args:
        pool: Groups of earlier steps; holds those for later ones afterwards.
        engine: Has no requests, before and after.
        scored: Stream of scored groups.
        slots: What is to be filled.
        step: Number of the training phase that the slots are for.
        prompts: New prompts to begin with.
        spares: Prompts that take the places of groups that are not worth training on.
        worth: Whether a group is worth training on.
    """
    report = GenerationReport(begun=len(prompts))
    waiting = list(spares)
    pool.drop_old(step, report)
    _submit(engine, pool, pool.in_order(pool.begin(prompts)))
    filled = 0
    while True:
        for group in pool.filled(len(slots) - filled):
            yield Emit("groups", slots[filled], group)
            filled += 1
        if filled == len(slots):
            break
        complete: list[PromptGroup] = []
        while filled + len(complete) < len(slots):
            if not engine.unfinished:
                raise RuntimeError(f"{len(pool)} groups do not fill {len(slots)} slots")
            for group in pool.take(engine.step(), report):
                # Any slot of this worker brings the scores back to it.
                yield Emit("completions", slots[group.draw % len(slots)], group)
                complete.append(group)
        _submit(engine, pool, _judge(pool, complete, scored, waiting, worth=worth, report=report))
    # An engine that generates between the steps may have completed groups since the last one.
    complete = pool.take(engine.abort(), report)
    for group in complete:
        yield Emit("completions", slots[group.draw % len(slots)], group)
    _judge(pool, complete, scored, waiting, worth=worth, report=report)
    report.carried = len(pool)
    return report


def _judge(
    pool: GroupPool,
    complete: Sequence[PromptGroup],
    scored: InputStream,
    waiting: list[Drawn],
    *,
    worth: Callable[[PromptGroup], bool],
    report: GenerationReport,
) -> list[OpenGroup]:
    """Keep the groups that are worth it, once they are scored; returns what replaces the others."""
    fresh: list[OpenGroup] = []
    found = {item.payload.draw: item.payload for item in _next(scored, len(complete))}
    for group in (found[unscored.draw] for unscored in complete):
        if waiting and not worth(group):
            spare = waiting.pop(0)
            report.spares.append(spare[0])
            pool.reject(group)
            fresh += pool.begin([spare])
        else:
            pool.keep(group)
    return fresh


def _submit(engine: Engine, pool: GroupPool, groups: Iterable[OpenGroup]) -> None:
    for request in pool.requests(groups):
        engine.submit(request)


def _next(scored: InputStream, count: int) -> Iterator[Item]:
    for _ in range(count):
        yield next(scored)
