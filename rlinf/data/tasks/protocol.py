"""What a generated task offers: items with exact answers, in two disjoint splits."""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlinf.data.tasks.base_config import TaskConfig
from rlinf.errors import ConfigError

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 8
"""Of so many prompts one is held out."""
_PATIENCE = 20_000
"""Draws without a new prompt after which a level is taken to have no more."""

ANSWER_TAGS = ("<answer>", "</answer>")
"""What stands around the answer of a target; a tokenizer may take each for one token."""


@dataclass(frozen=True, kw_only=True)
class TaskItem:
    """One task.

    Args:
        prompt: Text of the prompt.
        answer: Reference answer.
        target: A completion that is right, to imitate; it ends in ``<answer>…</answer>``.
        level: Level of difficulty.
    """

    prompt: str
    answer: str
    target: str
    level: int


def make_item(prompt: str, answer: str, level: int, *, steps: str = "") -> TaskItem:
    """An item whose target is the steps and the tagged answer."""
    target = f"{steps}{ANSWER_TAGS[0]}{answer}{ANSWER_TAGS[1]}"
    return TaskItem(prompt=prompt, answer=answer, target=target, level=level)


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to: a function of its text alone."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "held_out" if digest[0] % HELD_OUT_ONE_IN == 0 else "train"


class Task(ABC):
    """Draws items; which ones is a function of the configuration alone."""

    alphabet: str
    """Every character of prompts and targets, apart from the answer tags."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def draw(self, level: int, random_numbers: random.Random) -> TaskItem:
        """A random item of a level, of either split."""

    def items(self, split: Split) -> tuple[TaskItem, ...]:
        """The training or the held-out set, all prompts different, levels mixed.

        Raises:
            ConfigError: A level has not so many different prompts.
        """
        config = self.config
        count = config.size if split == "train" else config.held_out
        shares = config.shares or (1.0,) * len(config.levels)
        found: dict[str, TaskItem] = {}
        for level, wanted in zip(config.levels, apportion(count, shares), strict=True):
            self._fill(found, split, level, wanted)
        mixed = list(found.values())
        random.Random(f"order/{config.seed}").shuffle(mixed)
        return tuple(mixed)

    def stream(self, split: Split, seed: int) -> Iterator[TaskItem]:
        """Items without end, prompts repeating by chance, levels drawn by their shares."""
        shares = self.config.shares or (1.0,) * len(self.config.levels)
        random_numbers = random.Random(f"stream/{self.config.type}/{split}/{seed}")
        while True:
            (level,) = random_numbers.choices(self.config.levels, shares)
            item = self.draw(level, random_numbers)
            if split_of(item.prompt) == split:
                yield item

    def _fill(self, found: dict[str, TaskItem], split: Split, level: int, wanted: int) -> None:
        config = self.config
        random_numbers = random.Random(f"{config.type}/{split}/{level}/{config.seed}")
        before, misses = len(found), 0
        while len(found) - before < wanted:
            item = self.draw(level, random_numbers)
            if item.prompt in found or split_of(item.prompt) != split:
                misses += 1
                if misses == _PATIENCE:
                    self._refuse(split, level, wanted, len(found) - before)
                continue
            misses = 0
            found[item.prompt] = item

    def _refuse(self, split: Split, level: int, wanted: int, there_are: int) -> None:
        where = "training" if split == "train" else "held-out"
        raise ConfigError(
            f"level {level} of {self.config.type} has {there_are} different {where} prompts, "
            f"{wanted} are wanted; nearest: {there_are} of this level, or add a harder one",
            key="size" if split == "train" else "held_out",
        )


def apportion(count: int, shares: tuple[float, ...]) -> list[int]:
    """Divide a count by shares, to whole numbers of the same sum (largest remainders)."""
    exact = [count * share / math.fsum(shares) for share in shares]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: count - sum(whole)]:
        whole[i] += 1
    return whole
