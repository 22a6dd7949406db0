"""Numbers of devices as ranges, in the way that a recipe writes them."""

from __future__ import annotations

from collections.abc import Iterable


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Begin and end of the runs of numbers that follow each other, in the order that is given.

    >>> ranges_of([0, 1, 2, 6])
    [(0, 3), (6, 7)]
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1]:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def device_span(begin: int, end: int) -> str:
    """Devices from one on up to another, which is left out: ``0-2``, or ``6``."""
    return str(begin) if end == begin + 1 else f"{begin}-{end - 1}"


def device_ranges(devices: Iterable[int]) -> str:
    """Numbers as a person writes them: ``0-2,6``."""
    return ",".join(device_span(*each) for each in ranges_of(sorted(devices)))
