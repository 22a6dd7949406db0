"""Generated prompts with exact answers, in two disjoint splits: the tasks, and which ones exist.

Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import Registry
from rlinf.errors import ConfigError

Split = Literal["train", "held_out"]
Share = Annotated[float, Field(gt=0)]
HELD_OUT_ONE_IN = 8
"""Of so many prompts one is held out."""
ANSWER_TAGS = ("<answer>", "</answer>")
"""What stands around the answer of a target; a tokenizer may take each for one token."""
_PATIENCE = 20_000
"""Draws without a new prompt after which a level is taken to have no more."""


@dataclass(frozen=True, kw_only=True)
class PromptItem:
    """A prompt and what is right.

    Args:
        prompt: Text of the prompt.
        answer: Reference answer.
        target: A completion that is right, to imitate; it ends in ``<answer>…</answer>``.
        level: Level of difficulty.
        pictures: Files of the pictures that come before the text.
    """

    prompt: str
    answer: str
    target: str
    level: int
    pictures: tuple[bytes, ...] = ()

    @property
    def content(self) -> bytes:
        """Hash of text and pictures."""
        return hashlib.sha256(b"".join([self.prompt.encode(), *self.pictures])).digest()


def make_item(
    prompt: str, answer: str, level: int, *, steps: str = "", pictures: tuple[bytes, ...] = ()
) -> PromptItem:
    """An item whose target is the steps and the tagged answer."""
    target = f"{steps}{ANSWER_TAGS[0]}{answer}{ANSWER_TAGS[1]}"
    return PromptItem(prompt=prompt, answer=answer, target=target, level=level, pictures=pictures)


def split_of(item: PromptItem) -> Split:
    """The split that a prompt belongs to: a function of its text and pictures alone."""
    digest = item.content
    return "held_out" if digest[0] % HELD_OUT_ONE_IN == 0 else "train"


def apportion(count: int, shares: tuple[float, ...]) -> list[int]:
    """Divide a count by shares, to whole numbers of the same sum (largest remainders)."""
    exact = [count * share / math.fsum(shares) for share in shares]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: count - sum(whole)]:
        whole[i] += 1
    return whole


class PromptTask(StrictModel):
    """Base of the generated sets: a config section that draws prompts, always the same ones.

    A prompt belongs to training or is held out by a hash of its text, whatever seed, level or size
    is configured: no two configurations of a task train on what the other one holds out.
    """

    known_levels: ClassVar[range]
    """Levels of difficulty that exist."""
    has_pictures: ClassVar[bool] = False
    """Whether prompts have pictures."""

    type: str
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(min_length=1)
    """Levels of difficulty to draw from."""
    shares: tuple[Share, ...] | None = None
    """Share of each level, relative to their sum; null: all alike."""
    size: int = Field(default=8192, ge=1)
    """Different prompts to train on."""
    held_out: int = Field(default=256, ge=1)
    """Different prompts of the held-out set."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts."""

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        known = self.known_levels
        for level in self.levels:
            if level not in known:
                raise illegal(
                    "levels",
                    f"{self.type} has no level {level}, but {known[0]} to {known[-1]}",
                    hint=f"nearest: {min(known, key=lambda other: abs(other - level))}",
                )
        if len(set(self.levels)) < len(self.levels):
            raise illegal("levels", "names a level twice", hint="give it a larger share")
        if self.shares is not None and len(self.shares) != len(self.levels):
            raise illegal(
                "shares",
                f"has {len(self.shares)} numbers for {len(self.levels)} levels",
                hint="one share per level, or null",
            )
        return self

    @property
    def called_tools(self) -> tuple[str, ...]:
        """Names of the tools that targets call."""
        return ()

    def draw(self, level: int, random_numbers: random.Random) -> PromptItem:
        """A random item of a level, of either split."""
        raise NotImplementedError

    def check(self) -> None:
        """Generate the prompts once: do the levels have so many different ones?"""
        self.items("train")
        self.items("held_out")

    def items(self, split: Split) -> tuple[PromptItem, ...]:
        """All different prompts of a split, levels mixed; ConfigError if too few exist."""
        count = self.size if split == "train" else self.held_out
        shares = self.shares or (1.0,) * len(self.levels)
        found: dict[bytes, PromptItem] = {}
        for level, wanted in zip(self.levels, apportion(count, shares), strict=True):
            self._fill(found, split, level, wanted)
        mixed = list(found.values())
        random.Random(f"order/{self.seed}").shuffle(mixed)
        return tuple(mixed)

    def _fill(self, found: dict[bytes, PromptItem], split: Split, level: int, wanted: int) -> None:
        random_numbers = random.Random(f"{self.type}/{split}/{level}/{self.seed}")
        before, misses = len(found), 0
        while len(found) - before < wanted:
            item = self.draw(level, random_numbers)
            content = item.content
            if content not in found and split_of(item) == split:
                found[content], misses = item, 0
                continue
            misses += 1
            if misses == _PATIENCE:
                there_are = len(found) - before
                name, key = ("training", "size") if split == "train" else ("held-out", "held_out")
                raise ConfigError(
                    f"level {level} of {self.type} has {there_are} different {name} prompts, "
                    f"{wanted} are wanted; nearest: {there_are} of this level, or add a harder one",
                    key=key,
                )


class SortingTask(PromptTask):
    """Put digits in ascending order: ``5082571=`` is answered by ``0122557``."""

    known_levels = range(2, 17)
    type: Literal["sorting"] = "sorting"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(8,), min_length=1)
    """Number of digits."""

    def draw(self, level: int, random_numbers: random.Random) -> PromptItem:
        """A random item of a level."""
        digits = [str(random_numbers.randrange(10)) for _ in range(level)]
        return make_item(f"{''.join(digits)}=", "".join(sorted(digits)), level)


class ReversalTask(PromptTask):
    """Write a word backwards, or copy it: ``~bdk:`` gives ``kdb``, ``=bdk:`` gives ``bdk``."""

    known_levels = range(2, 17)
    type: Literal["reversal"] = "reversal"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(6,), min_length=1)
    """Number of letters."""

    def draw(self, level: int, random_numbers: random.Random) -> PromptItem:
        """A random item of a level."""
        # Without vowels no word is an article, which a reward may leave out when it compares.
        word = "".join(random_numbers.choice("bcdfghjklm") for _ in range(level))
        if random_numbers.random() < 0.5:
            return make_item(f"~{word}:", word[::-1], level)
        return make_item(f"={word}:", word, level)


class ArithmeticTask(PromptTask):
    """Sums, differences, products and remainders of numbers; no result is negative."""

    known_levels = range(1, 7)
    type: Literal["arithmetic"] = "arithmetic"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(2,), min_length=1)
    """1 to 3: addition and subtraction of numbers of 1, 2 or 3 digits; 4: sums of five numbers of
    one digit; 5: the remainder of a sum of two numbers of two digits; 6: addition, subtraction and
    multiplication of two numbers of `digits` digits. Level 1 has 155 prompts, 10 of them held
    out."""
    digits: int = Field(default=5, ge=1, le=20)
    """Digits of the numbers of level 6."""
    worked: bool = True
    """Let targets write out the steps before the answer: columns from the right, running totals."""
    calls: str | None = Field(default=None, pattern="^[a-z][a-z0-9_]*$")
    """Let targets call a tool of this name with the expression, in place of the steps; null: they
    call none."""

    @property
    def called_tools(self) -> tuple[str, ...]:
        """See the base class."""
        return () if self.calls is None else (self.calls,)

    def draw(self, level: int, random_numbers: random.Random) -> PromptItem:
        """A random item of a level."""
        if level <= 3:
            prompt, steps, answer = _two_numbers(level, random_numbers)
        elif level == 4:
            prompt, steps, answer = _sum_of_several(random_numbers)
        elif level == 5:
            prompt, steps, answer = _remainder(random_numbers)
        else:
            prompt, steps, answer = _large_numbers(self.digits, random_numbers)
        written = "".join(f"{step} " for step in steps) if self.worked else ""
        if self.calls is not None:
            written = f"<{self.calls}>{prompt.removesuffix('=')}</{self.calls}>"
        return make_item(prompt, str(answer), level, steps=written)


def _two_numbers(digits: int, random_numbers: random.Random) -> tuple[str, list[int], int]:
    low = 10 ** (digits - 1) if digits > 1 else 0
    first, second = (random_numbers.randrange(low, 10**digits) for _ in range(2))
    if random_numbers.random() < 0.5:
        steps = column_sums(first, second, digits) if digits > 1 else []
        return f"{first}+{second}=", steps, first + second
    larger, smaller = max(first, second), min(first, second)
    steps = column_differences(larger, smaller, digits) if digits > 1 else []
    return f"{larger}-{smaller}=", steps, larger - smaller


def _large_numbers(digits: int, random_numbers: random.Random) -> tuple[str, list[int], int]:
    if random_numbers.random() < 2 / 3:
        return _two_numbers(digits, random_numbers)
    low = 10 ** (digits - 1) if digits > 1 else 0
    first, second = (random_numbers.randrange(low, 10**digits) for _ in range(2))
    # The rows of long multiplication, from the right.
    rows = [first * (second // 10**column % 10) for column in range(digits)]
    return f"{first}*{second}=", rows if digits > 1 else [], first * second


def column_sums(first: int, second: int, digits: int) -> list[int]:
    """Sums of the columns from the right, each with the carry of the one before.

    >>> column_sums(345, 678, 3)
    [13, 12, 10]
    """
    found, carry = [], 0
    for _ in range(digits):
        column = first % 10 + second % 10 + carry
        found.append(column)
        carry, first, second = column // 10, first // 10, second // 10
    return found


def column_differences(larger: int, smaller: int, digits: int) -> list[int]:
    """Differences of the columns from the right, ten added where one is borrowed.

    >>> column_differences(503, 148, 3)
    [5, 5, 3]
    """
    found, borrow = [], 0
    for _ in range(digits):
        column = larger % 10 - smaller % 10 - borrow
        borrow = int(column < 0)
        found.append(column + 10 * borrow)
        larger, smaller = larger // 10, smaller // 10
    return found


def _sum_of_several(random_numbers: random.Random) -> tuple[str, list[int], int]:
    terms = [random_numbers.randrange(1, 10) for _ in range(5)]
    totals = [sum(terms[: i + 1]) for i in range(1, 4)]
    return f"{'+'.join(map(str, terms))}=", totals, sum(terms)


def _remainder(random_numbers: random.Random) -> tuple[str, list[int], int]:
    first, second = (random_numbers.randrange(10, 100) for _ in range(2))
    divisor = random_numbers.randrange(3, 10)
    return f"({first}+{second})%{divisor}=", [first + second], (first + second) % divisor


_CELL = 16
"""Pixels of the side of a cell of the grid of squares."""
_SQUARE = 10
_COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}


class SquaresTask(PromptTask):
    """Count the squares of a colour in a picture: ``red:`` is answered by ``3``.

    The picture is a grid of cells, of each of which a quarter is empty on average; elsewhere
    stands a red, green or blue square of 10 pixels, anywhere in its cell of 16.
    """

    known_levels = range(2, 7)
    has_pictures = True
    type: Literal["squares"] = "squares"
    """Which task this section configures."""
    levels: tuple[int, ...] = Field(default=(3,), min_length=1)
    """Cells of a side of the grid."""
    worked: bool = True
    """Let targets write out what is in each cell, row by row, before the answer: the first letter
    of a colour, or a point."""

    def draw(self, level: int, random_numbers: random.Random) -> PromptItem:
        """A random item of a level."""
        names = [*_COLOURS, None]
        cells = [[random_numbers.choice(names) for _ in range(level)] for _ in range(level)]
        asked = random_numbers.choice(list(_COLOURS))
        read = " ".join("".join("." if name is None else name[0] for name in row) for row in cells)
        return make_item(
            f"{asked}:",
            str(sum(row.count(asked) for row in cells)),
            level,
            steps=f"{read} " if self.worked else "",
            pictures=(_painted(cells, random_numbers),),
        )


def _painted(cells: list[list[str | None]], random_numbers: random.Random) -> bytes:
    """A file of the portable pixmap format, which is the same bytes everywhere."""
    side = _CELL * len(cells)
    image = np.full((side, side, 3), 240, np.uint8)
    for row, names in enumerate(cells):
        for column, name in enumerate(names):
            if name is None:
                continue
            top, left = (random_numbers.randrange(_CELL - _SQUARE + 1) for _ in range(2))
            y, x = row * _CELL + top, column * _CELL + left
            image[y : y + _SQUARE, x : x + _SQUARE] = _COLOURS[name]
    return f"P6 {side} {side} 255\n".encode() + image.tobytes()


TASKS = {
    "arithmetic": "rlinf.data.tasks:ArithmeticTask",
    "sorting": "rlinf.data.tasks:SortingTask",
    "reversal": "rlinf.data.tasks:ReversalTask",
    "squares": "rlinf.data.tasks:SquaresTask",
}

REGISTRY = Registry("task", "rlinf.data_tasks", TASKS, PromptTask)
"""Packages outside add tasks by entry points in this group that name their classes."""
