"""Groups that one worker generates over several steps: interrupted, carried, continued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf.checkpoint.records import from_tree, to_tree
from rlinf.data.sequences import Completion, PromptGroup, Score
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.workers.generation_round import Drawn, GenerationReport, completion_seed
from rlinf.workers.partial_config import PartialRolloutConfig


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A group that is not complete.

    Args:
        prompt_id: As in :class:`~rlinf.data.sequences.PromptGroup`, like the next three.
        draw: Also its number in the pool.
        prompt_tokens: [P] int64.
        answer: Reference of the reward.
        completions: G of them: ended, interrupted (``abort``), or None where not begun.
    """

    prompt_id: int
    draw: int
    prompt_tokens: np.ndarray
    answer: Any
    completions: tuple[Completion | None, ...]

    @property
    def tokens(self) -> int:
        """Tokens that were sampled for it."""
        return sum(len(c.sampled_tokens) for c in self.completions if c is not None)

    @property
    def complete(self) -> bool:
        """Whether every completion has ended."""
        return all(c is not None and c.stop_reason != "abort" for c in self.completions)

    def oldest(self) -> float:
        """Version of the oldest weights that sampled a token of it; infinite without tokens."""
        return _oldest(self.completions)


class GroupPool:
    """The groups of one worker that have no slot yet.

    Every group that was begun is in the pool until it is handed out by :meth:`filled`, so that
    none is lost or trained on twice.

    Args:
        config: How much is generated at once, and in which order.
        group_size: G.
        sampling: How tokens are drawn.
        seed: Seed of the run.
    """

    def __init__(
        self, config: PartialRolloutConfig, *, group_size: int, sampling: SamplingConfig, seed: int
    ) -> None:
        self._config = config
        self._size = group_size
        self._sampling = sampling
        self._seed = seed
        self._open: dict[int, OpenGroup] = {}
        self._scored: list[PromptGroup] = []
        self._lengths: dict[int, float] = {}
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._scored)

    def begin(self, prompts: Iterable[Drawn]) -> list[OpenGroup]:
        """Take in prompts that were just drawn."""
        fresh = [
            OpenGroup(
                prompt_id=prompt.prompt_id,
                draw=draw,
                prompt_tokens=prompt.tokens,
                answer=prompt.answer,
                completions=(None,) * self._size,
            )
            for draw, prompt in prompts
        ]
        self._open.update((group.draw, group) for group in fresh)
        return fresh

    def drop_old(self, step: int, report: GenerationReport) -> None:
        """Forget what was sampled for groups that would be trained on beyond the bound."""
        bound = self._config.max_token_staleness
        if bound is None or self._config.too_old == "mask":
            return
        oldest = step - bound
        kept, self._scored = self._scored, []
        for scored in kept:
            if _oldest(scored.completions) >= oldest:
                self._scored.append(scored)
                continue
            self._open[scored.draw] = OpenGroup(
                prompt_id=scored.prompt_id,
                draw=scored.draw,
                prompt_tokens=scored.prompt_tokens,
                answer=scored.answer,
                completions=scored.completions,
            )
        for group in list(self._open.values()):
            if group.oldest() < oldest:
                report.regenerated += 1
                report.dropped_tokens += group.tokens
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

    def requests(self, groups: Iterable[OpenGroup]) -> list[GenerationRequest]:
        """What is missing of some groups; a request's number tells draw and place."""
        found = []
        for group in groups:
            for place, begun in enumerate(group.completions):
                if begun is not None and begun.stop_reason != "abort":
                    continue
                number = group.draw * self._size + place
                self._known[number] = 0 if begun is None else len(begun.sampled_tokens)
                found.append(
                    GenerationRequest(
                        request_id=number,
                        prompt_tokens=group.prompt_tokens,
                        seed=completion_seed(self._seed, group.draw, place),
                        sampling=self._sampling,
                        partial=begun,
                    )
                )
        return found

    def take(
        self, ended: Iterable[FinishedCompletion], report: GenerationReport
    ) -> list[PromptGroup]:
        """The groups that are complete by these completions, ended or interrupted."""
        complete = []
        for item in ended:
            draw, place = divmod(item.request_id, self._size)
            found: Completion | None = item.completion
            sampled = len(item.completion.sampled_tokens)
            report.tokens += sampled - self._known.pop(item.request_id)
            if item.completion.stop_reason == "abort":
                report.interrupted += 1
                found = item.completion if len(item.completion) else None
            else:
                report.completions += 1
                report.turns += item.completion.turns
            before = self._open[draw]
            completions = (*before.completions[:place], found, *before.completions[place + 1 :])
            group = self._open[draw] = replace(before, completions=completions)
            if group.complete:
                complete.append(_closed(group))
                self._note_length(group)
        return complete

    def _note_length(self, group: OpenGroup) -> None:
        """Remember how long the answers to a prompt are: half of it what was known before."""
        length = group.tokens / self._size
        known = self._lengths.get(group.prompt_id, length)
        self._lengths[group.prompt_id] = 0.5 * (known + length)

    def reject(self, group: PromptGroup) -> None:
        """Forget a complete group that is not worth training on."""
        del self._open[group.draw]

    def keep(self, group: PromptGroup) -> None:
        """Keep a scored group until there is a slot for it."""
        del self._open[group.draw]
        self._scored.append(group)

    def filled(self, most: int) -> list[PromptGroup]:
        """Hand out the oldest scored groups."""
        taken, self._scored = self._scored[:most], self._scored[most:]
        return taken

    def state(self) -> dict[str, Any]:
        """Everything but the settings, while nothing is being generated."""
        return {
            "open": to_tree(list(self._open.values())),
            "scored": to_tree(self._scored),
            "lengths": {str(prompt): length for prompt, length in self._lengths.items()},
        }

    def load_state(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take this worker's share of what the workers of a run had.

        Args:
            states: :meth:`state` of each.
            rank: This worker.
            ranks: Workers there are now.
        """
        records = (OpenGroup, PromptGroup, Completion, Score)
        if len(states) == ranks:
            states, rank, ranks = [states[rank]], 0, 1
        opened = [group for state in states for group in from_tree(state["open"], records)]
        scored = [group for state in states for group in from_tree(state["scored"], records)]
        self._open = {group.draw: group for group in opened[rank::ranks]}
        self._scored = scored[rank::ranks]
        self._lengths = {int(k): v for state in states for k, v in state["lengths"].items()}


def _closed(group: OpenGroup) -> PromptGroup:
    return PromptGroup(
        prompt_id=group.prompt_id,
        draw=group.draw,
        prompt_tokens=group.prompt_tokens,
        answer=group.answer,
        completions=tuple(found for found in group.completions if found is not None),
    )


def _oldest(completions: Iterable[Completion | None]) -> float:
    versions = [c.versions.min() for c in completions if c is not None and len(c)]
    return float(min(versions, default=math.inf))
