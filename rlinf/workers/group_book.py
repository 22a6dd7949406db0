"""The groups that one rollout worker generates: which are open, complete or scored, and where.

A *position* is the place of a group in the batch of a step. A group has the number of its prompt's
draw, which no two groups of a run share; a request of its place p has the number draw · G + p.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.data.pictures import Pictures
from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion, PromptGroup
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest, KeptCache

Drawn = tuple[int, Prompt]
"""A prompt with the number of its draw."""


@dataclass
class GenerationReport:
    """What one worker generated in a step.

    Args:
        tokens: Sampled tokens, those of rejected groups included.
        completions: Completions that ended.
        turns: Turns of these.
        tool_failures: Calls that a tool failed.
        begun: Groups that were begun, spares left out.
        interrupted: Completions that go on in the next step.
        carried: Groups that have no position yet, complete ones included.
        regenerated: Groups that were forgotten for their age and begun anew.
        dropped_tokens: Tokens of these.
        engine_restarts: How often the engine's process was started anew since the step before.
        moved: Completions that went on at another worker.
        spares: Draws of the prompts that took the places of groups not worth training on.
        choices: What was decided about devices, as plain data.
        groups: The scored groups in the order of their positions, where they were asked for.
    """

    tokens: int = 0
    completions: int = 0
    turns: int = 0
    tool_failures: int = 0
    begun: int = 0
    interrupted: int = 0
    carried: int = 0
    regenerated: int = 0
    dropped_tokens: int = 0
    engine_restarts: int = 0
    moved: int = 0
    spares: list[int] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    groups: list[PromptGroup] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A group that has not all its scored completions.

    Args:
        prompt_id: As in :class:`~rlinf.data.sequences.PromptGroup`, like the next three.
        draw: Also its number in a book.
        prompt_tokens: [P] int64.
        answer: Reference of the reward.
        pictures: Those among the tokens of the prompt.
        columns: What else the reward is given.
        completions: G of them: ended, interrupted (``abort``), or None where not begun.
    """

    prompt_id: int
    draw: int
    prompt_tokens: np.ndarray
    answer: Any
    completions: tuple[Completion | None, ...]
    pictures: Pictures = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that were sampled for it."""
        return sum(len(c.sampled_tokens) for c in self.completions if c is not None)

    @property
    def unfinished(self) -> int:
        """Completions that go on."""
        return sum(c is None or c.stop_reason == "abort" for c in self.completions)

    def closed(self) -> PromptGroup:
        """The group, all of whose completions have ended."""
        return PromptGroup(
            prompt_id=self.prompt_id,
            draw=self.draw,
            prompt_tokens=self.prompt_tokens,
            answer=self.answer,
            completions=tuple(found for found in self.completions if found is not None),
            pictures=self.pictures,
            columns=self.columns,
        )


@dataclass(frozen=True, kw_only=True)
class MovingGroup:
    """A group on its way to another worker, and caches of its completions from some engines."""

    position: int
    group: OpenGroup
    caches: tuple[KeptCache | None, ...]


class GroupBook(ABC):
    """Groups from their prompt to a position; ``report`` is of the present step.

    Args:
        group_size: G.
        sampling: How tokens are drawn.
        seeds: From a draw to the seeds of its G completions.
        worth: Whether a scored group is worth training on.
        scored: Whether the log-probs of the completions are used.
    """

    def __init__(
        self,
        group_size: int,
        sampling: SamplingConfig,
        seeds: Callable[[int], Sequence[int]],
        worth: Callable[[PromptGroup], bool] = lambda group: True,
        *,
        scored: bool = True,
    ) -> None:
        self._scored = scored
        self._size, self._sampling, self._seeds, self._worth = group_size, sampling, seeds, worth
        self._open: dict[int, OpenGroup] = {}
        self._known: dict[int, int] = {}  # tokens with which each request was submitted
        self._filled: list[tuple[int, PromptGroup]] = []
        self.report = GenerationReport()

    def __len__(self) -> int:
        """Groups that have no position for good."""
        return len(self._open)

    @property
    @abstractmethod
    def unfilled(self) -> bool:
        """Whether a position of the step has no final group yet."""

    @property
    @abstractmethod
    def awaits_scores(self) -> bool:
        """Whether scores are looked at now."""

    def waits(self, *, idle: bool) -> bool:
        """Whether scores are waited for before the next step of the engine."""
        return idle

    @abstractmethod
    def source(self, draw: int) -> int:
        """Position by whose number the scores of a group come back to their worker."""

    @abstractmethod
    def score(self, group: PromptGroup) -> list[GenerationRequest]:
        """Take in a scored group; returns what is to be generated in its place."""

    def filled(self) -> list[tuple[int, PromptGroup]]:
        """Positions that got their final group since the last time."""
        found, self._filled = self._filled, []
        return found

    def take(self, ended: Iterable[FinishedCompletion]) -> list[PromptGroup]:
        """The groups that are complete by these completions, ended or interrupted."""
        complete = []
        for item in ended:
            group = self._note(item)
            self.report.interrupted += item.completion.stop_reason == "abort"
            if not group.unfinished:
                self._complete(group)
                complete.append(group.closed())
        return complete

    def _note(self, item: FinishedCompletion) -> OpenGroup:
        """Write down what came of a request."""
        draw, place = divmod(item.request_id, self._size)
        found: Completion | None = item.completion
        self.report.tokens += len(item.completion.sampled_tokens) - self._known.pop(item.request_id)
        if item.completion.stop_reason != "abort":
            self.report.completions += 1
            self.report.turns += item.completion.turns
        elif not len(item.completion):
            found = None
        before = self._open[draw].completions
        completions = (*before[:place], found, *before[place + 1 :])
        group = self._open[draw] = replace(self._open[draw], completions=completions)
        return group

    @abstractmethod
    def _complete(self, group: OpenGroup) -> None:
        """Called when all completions of a group have ended."""

    def _begin(self, prompts: Iterable[Drawn]) -> list[OpenGroup]:
        fresh = [
            OpenGroup(
                prompt_id=prompt.prompt_id,
                draw=draw,
                prompt_tokens=prompt.tokens,
                answer=prompt.answer,
                completions=(None,) * self._size,
                pictures=prompt.pictures,
                columns=prompt.columns,
            )
            for draw, prompt in prompts
        ]
        self._open.update((group.draw, group) for group in fresh)
        return fresh

    def _requests(
        self, groups: Iterable[OpenGroup], caches: Mapping[int, KeptCache | None] | None = None
    ) -> list[GenerationRequest]:
        """What is missing of some groups, which may go on with caches, by number of the request."""
        found = []
        for group in groups:
            seeds = self._seeds(group.draw)
            for place, begun in enumerate(group.completions):
                if begun is not None and begun.stop_reason != "abort":
                    continue
                number = group.draw * self._size + place
                self._known[number] = 0 if begun is None else len(begun.sampled_tokens)
                found.append(
                    GenerationRequest(
                        request_id=number,
                        prompt_tokens=group.prompt_tokens,
                        seed=seeds[place],
                        sampling=self._sampling,
                        pictures=group.pictures,
                        partial=begun,
                        cache=None if caches is None else caches[number],
                        scored=self._scored,
                    )
                )
        return found


class PositionBook(GroupBook):
    """Every position has its prompt from the beginning, and all are generated to their end.

    Groups can be brought to another worker while they are generated, and come back; their scores
    come to the worker whose position it is, so that no group is lost or counted twice.

    Attributes:
        complete: Longest answer of each group that was completed here, by position.
        given: Groups that went to others in this step.
        adopted: Groups that came from others.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._positions: dict[int, int] = {}  # by draw
        self._spares: dict[int, deque[Drawn]] = {}
        self._away: set[int] = set()
        self._guests: set[int] = set()
        self.complete: dict[int, int] = {}
        self.given = self.adopted = 0

    def begin(
        self, prompts: Mapping[int, Drawn], spares: Mapping[int, Iterable[Drawn]] | None = None
    ) -> list[GenerationRequest]:
        """The requests to begin with, of a prompt for each position.

        A position has its own spares, as which group is scored first depends on who is faster.
        """
        self._positions = {draw: position for position, (draw, _) in prompts.items()}
        self._spares = {position: deque(found) for position, found in (spares or {}).items()}
        self.report.begun = len(prompts)
        return self._requests(self._begin(prompts.values()))

    @property
    def unfilled(self) -> bool:
        """See :attr:`GroupBook.unfilled`; guests are not done before they are complete."""
        return bool(self._open)

    @property
    def awaits_scores(self) -> bool:
        """See :attr:`GroupBook.awaits_scores`: as they come."""
        return bool(self._open)

    def source(self, draw: int) -> int:
        """See :meth:`GroupBook.source`: its own."""
        return self._positions[draw]

    def score(self, group: PromptGroup) -> list[GenerationRequest]:
        """See :meth:`GroupBook.score`: a spare of the same position, where it has one."""
        position = self._positions[group.draw]
        del self._open[group.draw]
        if self._spares.get(position) and not self._worth(group):
            spare = self._spares[position].popleft()
            self.report.spares.append(spare[0])
            self._positions[spare[0]] = position
            return self._requests(self._begin([spare]))
        self._filled.append((position, group))
        return []

    def _complete(self, group: OpenGroup) -> None:
        self.complete[self._positions[group.draw]] = _longest(group.completions)
        if group.draw in self._guests:
            self._forget(group.draw)

    def _forget(self, draw: int) -> None:
        self._guests.discard(draw)
        del self._open[draw]

    # -- groups that change their worker --------------------------------------------------------

    def give(self, interrupted: Iterable[FinishedCompletion]) -> list[MovingGroup]:
        """The groups of all that the engine had not ended; they are generated elsewhere now."""
        caches = {}
        for item in interrupted:
            self._note(item)
            caches[item.request_id] = item.cache
        moved = []
        for draw in sorted({number // self._size for number in caches}, key=self.source):
            numbers = range(draw * self._size, (draw + 1) * self._size)
            moved.append(
                MovingGroup(
                    position=self.source(draw),
                    group=self._open[draw],
                    caches=tuple(caches.get(number) for number in numbers),
                )
            )
            if draw in self._guests:
                self._forget(draw)
            else:
                self._away.add(draw)
        self.given += len(moved)
        self.report.moved += sum(moving.group.unfinished for moving in moved)
        return moved

    def adopt(self, moving: MovingGroup) -> list[GenerationRequest]:
        """What is missing of a group that another worker gave, or this one before."""
        group, self.adopted = moving.group, self.adopted + 1
        if group.draw in self._away:
            self._away.discard(group.draw)
        else:
            self._guests.add(group.draw)
            self._positions[group.draw] = moving.position
        self._open[group.draw] = group
        first = group.draw * self._size
        return self._requests([group], dict(enumerate(moving.caches, first)))

    def bounds(self, running: Mapping[int, int]) -> dict[int, int]:
        """What the longest answer of each group that is generated here has at least, by position,
        from the tokens of each unfinished request, by its number."""
        found = {}
        for draw, group in self._open.items():
            if draw in self._away or not group.unfinished:
                continue
            first = draw * self._size
            going = (running.get(first + place, 0) for place in range(self._size))
            found[self._positions[draw]] = max(_longest(group.completions), *going)
        return found


def _longest(completions: Iterable[Completion | None]) -> int:
    return max(0 if c is None else len(c) for c in completions)


def completion_seed(seed: int, draw: int, place: int) -> int:
    """Seed of one completion: a function of the run, the draw of its prompt and its place."""
    state = np.random.SeedSequence((seed, draw, place)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
