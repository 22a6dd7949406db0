"""A partial rollout: the positions of a step are filled, and what is not complete goes on later.

Oversampling keeps the engine busy while the last answers of a step would be waited for, as in
APRIL (Zhou et al. 2025); interrupted answers go on under newer weights, as in Kimi k1.5 (2025).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.data.pictures import Picture
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import GenerationRequest
from rlinf.workers.config.answering import PartialRolloutConfig
from rlinf.workers.group_book import Drawn, GenerationReport, GroupBook, OpenGroup


class CarryBook(GroupBook):
    """Groups get a position when they are scored, and those that get none stay for later steps.

    Positions are filled in the order in which groups were complete, and scores are looked at only
    when as many are complete as there are positions to fill, so that the speed of the reward
    changes nothing. Every group that was begun is in the book until it has a position, so that none
    is lost or trained on twice.
    """

    def __init__(
        self,
        config: PartialRolloutConfig,
        group_size: int,
        sampling: SamplingConfig,
        seeds: Callable[[int], Sequence[int]],
        worth: Callable[[PromptGroup], bool] = lambda group: True,
    ) -> None:
        super().__init__(group_size, sampling, seeds, worth)
        self._config = config
        self._kept: list[PromptGroup] = []  # scored, without a position
        self._lengths: dict[int, float] = {}  # expected of the answers to a prompt
        self._positions: deque[int] = deque()  # to be filled
        self._own = range(0)
        self._spares: deque[Drawn] = deque()
        self._unscored: dict[int, PromptGroup | None] = {}  # complete groups in their order

    def __len__(self) -> int:
        return len(self._open) + len(self._kept)

    def begin(
        self, step: int, positions: range, prompts: Sequence[Drawn], spares: Iterable[Drawn] = ()
    ) -> list[GenerationRequest]:
        """The requests to fill the positions of a step with, while the engine has none."""
        self.report = GenerationReport(begun=len(prompts))
        self._own, self._positions, self._spares = positions, deque(positions), deque(spares)
        self._forget_old(step)
        found = self._requests(self.in_order(self._begin(prompts)))
        self._fill()
        return found

    def _forget_old(self, step: int) -> None:
        """Forget what was sampled for groups that would be trained on beyond the bound."""
        bound = self._config.max_token_staleness
        if bound is None or self._config.too_old == "mask":
            return
        oldest = step - bound
        kept, self._kept = self._kept, []
        for scored in kept:
            if _oldest_version(scored.completions) >= oldest:
                self._kept.append(scored)
                continue
            self._open[scored.draw] = OpenGroup(
                prompt_id=scored.prompt_id,
                draw=scored.draw,
                prompt_tokens=scored.prompt_tokens,
                answer=scored.answer,
                completions=scored.completions,
                pictures=scored.pictures,
                columns=scored.columns,
            )
        for group in list(self._open.values()):
            if _oldest_version(group.completions) < oldest:
                self.report.regenerated += 1
                self.report.dropped_tokens += group.tokens
                self._open[group.draw] = replace(group, completions=(None,) * self._size)

    def in_order(self, fresh: Sequence[OpenGroup]) -> list[OpenGroup]:
        """All open groups: carried ones first, as the schedule says, then ``fresh`` ones."""
        new = {group.draw for group in fresh}
        carried = [self._open[draw] for draw in sorted(self._open) if draw not in new]
        later = list(fresh)
        if self._config.schedule == "longest_first":
            carried.sort(key=lambda group: -group.tokens)
        elif self._config.schedule == "history":
            carried.sort(key=self._expected)
            later.sort(key=self._expected)
        return carried + later

    def _expected(self, group: OpenGroup) -> float:
        """Minus the length that is expected of a group's answers; unknown ones come first."""
        return -self._lengths.get(group.prompt_id, math.inf)

    @property
    def unfilled(self) -> bool:
        """See :attr:`GroupBook.unfilled`."""
        return bool(self._positions)

    @property
    def awaits_scores(self) -> bool:
        """See :attr:`GroupBook.awaits_scores`: not before the positions can be filled."""
        return bool(self._unscored) and len(self._unscored) >= len(self._positions)

    def waits(self, *, idle: bool) -> bool:
        """See :meth:`GroupBook.waits`: always, so that it never matters who is faster."""
        return True

    def source(self, draw: int) -> int:
        """See :meth:`GroupBook.source`: any position of this worker brings the scores back."""
        return self._own[draw % len(self._own)]

    def score(self, group: PromptGroup) -> list[GenerationRequest]:
        """See :meth:`GroupBook.score`: spares, once all complete groups are scored."""
        self._unscored[group.draw] = group
        scored = [found for found in self._unscored.values() if found is not None]
        if len(scored) < len(self._unscored):
            return []
        self._unscored.clear()
        fresh: list[OpenGroup] = []
        for found in scored:
            del self._open[found.draw]
            if self._spares and not self._worth(found):
                spare = self._spares.popleft()
                self.report.spares.append(spare[0])
                fresh += self._begin([spare])
            else:
                self._kept.append(found)
        self._fill()
        return self._requests(fresh)

    def _fill(self) -> None:
        """Hand the oldest scored groups out."""
        while self._positions and self._kept:
            self._filled.append((self._positions.popleft(), self._kept.pop(0)))

    def _complete(self, group: OpenGroup) -> None:
        """Remember how long the answers to a prompt are: half of it what was known before."""
        self._unscored[group.draw] = None
        length = group.tokens / self._size
        known = self._lengths.get(group.prompt_id, length)
        self._lengths[group.prompt_id] = 0.5 * (known + length)

    def state(self) -> dict[str, Any]:
        """Everything but the settings, while nothing is being generated."""
        return {
            "open": to_tree(list(self._open.values())),
            "scored": to_tree(self._kept),
            "lengths": {str(prompt): length for prompt, length in self._lengths.items()},
        }

    def load_state(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take this worker's share of what the workers of a run had, who may have been others."""
        records = (OpenGroup, PromptGroup, Completion, Score, Picture)
        if len(states) == ranks:
            states, rank, ranks = [states[rank]], 0, 1
        opened = [group for state in states for group in from_tree(state["open"], records)]
        scored = [group for state in states for group in from_tree(state["scored"], records)]
        self._open = {group.draw: group for group in opened[rank::ranks]}
        self._kept = scored[rank::ranks]
        self._lengths = {int(k): v for state in states for k, v in state["lengths"].items()}


def _oldest_version(completions: Iterable[Completion | None]) -> float:
    """Of the weights that sampled a token; infinite without tokens."""
    versions = [c.versions.min() for c in completions if c is not None and len(c)]
    return float(min(versions, default=math.inf))
