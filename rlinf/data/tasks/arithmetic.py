"""Sums, differences, products and remainders, with worked solutions or calls of a calculator."""

from __future__ import annotations

import random

from rlinf.data.tasks.config import ArithmeticConfig
from rlinf.data.tasks.protocol import Task, TaskItem, make_item

_TERMS = 5


class ArithmeticTask(Task):
    """``47+85=``, ``85-47=``, ``3+8+5+9+2=``, ``(47+85)%7=``, ``47*85=``; no result is
    negative."""

    alphabet = "0123456789+-()%= "

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(config)
        if 6 in config.levels:
            self.alphabet += "*"
        self._worked, self._digits, self._tool = config.worked, config.digits, config.calls

    def draw(self, level: int, random_numbers: random.Random) -> TaskItem:
        """A random item of a level."""
        if level <= 3:
            prompt, steps, answer = _two_numbers(level, random_numbers)
        elif level == 4:
            prompt, steps, answer = _sum_of_several(random_numbers)
        elif level == 5:
            prompt, steps, answer = _remainder(random_numbers)
        else:
            prompt, steps, answer = _large_numbers(self._digits, random_numbers)
        written = "".join(f"{step} " for step in steps) if self._worked else ""
        if self._tool is not None:
            written = f"<{self._tool}>{prompt.removesuffix('=')}</{self._tool}>"
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
    terms = [random_numbers.randrange(1, 10) for _ in range(_TERMS)]
    totals = [sum(terms[: i + 1]) for i in range(1, _TERMS - 1)]
    return f"{'+'.join(map(str, terms))}=", totals, sum(terms)


def _remainder(random_numbers: random.Random) -> tuple[str, list[int], int]:
    first, second = (random_numbers.randrange(10, 100) for _ in range(2))
    divisor = random_numbers.randrange(3, 10)
    return f"({first}+{second})%{divisor}=", [first + second], (first + second) % divisor
