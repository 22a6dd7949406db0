"""Digits to be put in ascending order."""

from __future__ import annotations

import random

from rlinf.data.tasks.protocol import Task, TaskItem, make_item


class SortingTask(Task):
    """``5082571=`` is answered by ``0122557``; a level is the number of digits."""

    alphabet = "0123456789="

    def draw(self, level: int, random_numbers: random.Random) -> TaskItem:
        """A random item of a level."""
        digits = [str(random_numbers.randrange(10)) for _ in range(level)]
        return make_item(f"{''.join(digits)}=", "".join(sorted(digits)), level)
