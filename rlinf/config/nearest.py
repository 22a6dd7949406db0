"""The nearest legal value, for error messages that say what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LONGEST = 1000


def nearest_names(wanted: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to ``count`` of ``names`` that look like ``wanted``, best first."""
    known = {name.lower(): name for name in sorted(names, reverse=True)}
    if len(wanted) > _LONGEST:  # which takes its time, and looks like nothing
        return []
    found = difflib.get_close_matches(wanted.lower(), known, n=count, cutoff=0.6)
    return [known[name] for name in found]


def did_you_mean(wanted: str, names: Iterable[str], *, list_up_to: int = 12) -> str:
    """Return a hint such as ``did you mean `gae_lambda`?`` or the list of what is known.

    The whole list follows when it is short or when nothing looks like ``wanted``.
    """
    known = sorted(set(names))
    close = nearest_names(wanted, known, count=1)
    parts = [f"did you mean `{close[0]}`?"] if close else []
    if known and (not close or len(known) <= list_up_to):
        parts.append(f"known: {', '.join(known)}")
    return " ".join(parts)


def nearest_divisors(total: int, wanted: int) -> list[int]:
    """Return the divisors of ``total`` next to ``wanted``: at most one below and one above.

    >>> nearest_divisors(800, 300)
    [200, 400]
    """
    return nearest_numbers([n for n in range(1, total + 1) if total % n == 0], wanted)


def nearest_numbers(legal: Iterable[int], wanted: int) -> list[int]:
    """Return the numbers of ``legal`` next to ``wanted``: itself, or one below and one above."""
    numbers = sorted(legal)
    if wanted in numbers:
        return [wanted]
    below = [number for number in numbers if number < wanted]
    return below[-1:] + numbers[len(below) : len(below) + 1]


def nearest_multiples(factor: int, wanted: int) -> list[int]:
    """Return the positive multiples of ``factor`` next to ``wanted``: for 8 and 30, 24 and 32."""
    if factor < 1:
        return []
    below = wanted // factor * factor
    if below == wanted and wanted > 0:
        return [wanted]
    return [number for number in (below, below + factor) if number > 0]


def join_choices(values: Sequence[object]) -> str:
    """Return ``200, 400`` for a sequence of values, as they are written in a recipe."""
    return ", ".join("null" if value is None else str(value) for value in values)
