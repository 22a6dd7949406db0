"""Groups of one step on their way: what was submitted, what is complete, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.data.prompts.dataset import Prompt
from rlinf.data.sequences import Completion, PromptGroup
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest

Drawn = tuple[int, Prompt]
"""A prompt with the number of its draw."""


@dataclass
class GenerationReport:
    """What one worker generated in a step.

    Args:
        tokens: Sampled tokens, those of rejected groups included.
        completions: Completions that ended.
        turns: Turns of these.
        begun: Groups that were begun, spares left out.
        interrupted: Completions that go on in the next step.
        carried: Groups that have no slot yet, complete ones included.
        regenerated: Groups that were forgotten for their age and begun anew.
        dropped_tokens: Tokens of these.
        engine_restarts: How often the engine's process was started anew in the run so far.
        moved: Completions that went on at another worker.
        spares: Draws of the spare prompts that took the places of groups that were not worth
            training on: one for each.
        choices: What was decided about devices, as plain data.
        groups: The scored groups in the order of their slots, where they were asked for.
    """

    tokens: int = 0
    completions: int = 0
    turns: int = 0
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


class Round:
    """The groups of one step that are being generated or scored, each in a slot of its own.

    Args:
        group_size: G.
        sampling: How tokens are drawn.
    """

    def __init__(self, group_size: int, sampling: SamplingConfig) -> None:
        self._size = group_size
        self._sampling = sampling
        self._prompts: dict[int, Drawn] = {}
        self._finished: dict[int, dict[int, Completion]] = {}
        self.report = GenerationReport()

    @property
    def open(self) -> bool:
        """Whether a slot has no final group yet."""
        return bool(self._prompts)

    def begin(self, slot: int, drawn: Drawn, seeds: Sequence[int]) -> list[GenerationRequest]:
        """The requests of a slot's group; a request's number tells slot and place."""
        self._prompts[slot] = drawn
        self._finished[slot] = {}
        return [
            GenerationRequest(
                request_id=slot * self._size + place,
                prompt_tokens=drawn[1].tokens,
                seed=seed,
                sampling=self._sampling,
            )
            for place, seed in enumerate(seeds)
        ]

    def take(self, ended: Iterable[FinishedCompletion]) -> list[tuple[PromptGroup, int]]:
        """The groups, with their slots, that are complete by these completions."""
        complete = []
        for item in ended:
            slot, place = divmod(item.request_id, self._size)
            finished = self._finished[slot]
            finished[place] = item.completion
            self.report.tokens += len(item.completion.sampled_tokens)
            self.report.turns += item.completion.turns
            self.report.completions += 1
            if len(finished) == self._size:
                complete.append((self._group(slot), slot))
        return complete

    def close(self, slot: int) -> None:
        """Note that a slot has its final group."""
        del self._prompts[slot], self._finished[slot]

    def _group(self, slot: int) -> PromptGroup:
        (draw, prompt), finished = self._prompts[slot], self._finished[slot]
        return PromptGroup(
            prompt_id=prompt.prompt_id,
            draw=draw,
            prompt_tokens=prompt.tokens,
            answer=prompt.answer,
            completions=tuple(finished[place] for place in range(self._size)),
        )


def completion_seed(seed: int, draw: int, place: int) -> int:
    """Seed of one completion: a function of the run, the draw of its prompt and its place."""
    state = np.random.SeedSequence((seed, draw, place)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
