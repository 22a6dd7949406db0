"""Words to be written backwards or copied."""

from __future__ import annotations

import random

from rlinf.data.tasks.protocol import Task, TaskItem, make_item

# Without vowels no word is an article, which a reward may leave out when it compares.
_LETTERS = "bcdfghjklm"


class ReversalTask(Task):
    """``~bdk:`` is answered by ``kdb`` and ``=bdk:`` by ``bdk``; levels count letters."""

    alphabet = f"{_LETTERS}~=:"

    def draw(self, level: int, random_numbers: random.Random) -> TaskItem:
        """A random item of a level."""
        word = "".join(random_numbers.choice(_LETTERS) for _ in range(level))
        if random_numbers.random() < 0.5:
            return make_item(f"~{word}:", word[::-1], level)
        return make_item(f"={word}:", word, level)
