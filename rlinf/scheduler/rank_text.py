"""Text forms of rank lists: ``3``, ``0-7`` (both ends included), ``0-3,5`` and ``all``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlinf.scheduler.errors import PlacementError, PlacementSyntaxError

ALL = "all"
LARGEST_RANK = 1_000_000
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?\Z")


def parse_range(text: str, kind: str) -> range:
    """Read ``3`` or ``0-7``; ``kind`` says in messages what the numbers count.

    Raises:
        PlacementSyntaxError: The text is no range, or runs backwards.
    """
    match = _RANGE.match(text)
    if match is None:
        raise PlacementSyntaxError(
            f"Invalid rank format '{text}' for {kind} ranks: expected a number or 'first-last' "
            f"with numbers of 0 or above.{_nearest_range(text)}"
        )
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise PlacementSyntaxError(
            f"Start rank {first} must be less than or equal to end rank {last} in '{text}' of "
            f"{kind} ranks. Nearest legal: '{last}-{first}'."
        )
    if last > LARGEST_RANK:
        raise PlacementSyntaxError(
            f"{kind} rank {last} in '{text}' is larger than any cluster. Ranks end at "
            f"{LARGEST_RANK}."
        )
    return range(first, last + 1)


def parse_ranks(value: object, kind: str, available: Sequence[int] | None = None) -> list[int]:
    """Read a list of ranks in any of its forms; ascending, without repetition.

    Args:
        value: A number, a list of numbers, or text such as ``0-3,5`` or ``all``.
        kind: What the ranks count, for messages.
        available: Legal ranks; needed for ``all``.

    Raises:
        PlacementSyntaxError: The value has none of these forms.
        PlacementError: A rank is not available.
    """
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        ranks = sorted(set(value))
    elif type(value) is int:
        ranks = [value]
    elif isinstance(value, str) and value.strip().lower() == ALL:
        if available is None:
            raise PlacementSyntaxError(f"'{ALL}' {kind} ranks need a known set of {kind}s.")
        return sorted(set(available))
    elif isinstance(value, str):
        ranks = sorted({rank for part in value.split(",") for rank in parse_range(part, kind)})
    else:
        raise PlacementSyntaxError(
            f"Invalid rank format {value!r} for {kind} ranks: expected a number, a list of "
            f"numbers, or text such as '0-3,5' or '{ALL}'."
        )
    outside = [] if available is None else sorted(set(ranks).difference(available))
    if outside:
        raise PlacementError(
            f"{kind} ranks {outside} of {value!r} are out of range: available are "
            f"{format_ranks(available or ())}."
        )
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """Shortest text of ascending ranks: ``0-3,5``; ``none`` without any."""
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or ranks[index] != ranks[index - 1] + 1:
            first, last = ranks[start], ranks[index - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = index
    return ",".join(parts) or "none"


def _nearest_range(text: str) -> str:
    if re.fullmatch(r"\s*-\s*\d+\s*", text):
        return " Nearest legal: '0'."
    numbers = re.findall(r"\d+", text)
    if not numbers:
        return " For example '0-3'."
    low, high = sorted((int(numbers[0]), int(numbers[-1])))
    return f" Nearest legal: '{low}'." if low == high else f" Nearest legal: '{low}-{high}'."
