"""Draws prompts without end, in an order that a number describes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf.data.draws import Draws
from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.errors import CheckpointError


class PromptLoader:
    """Epoch after epoch; with ``shuffle`` each has an order of its own, given by seed and epoch.

    Which prompt a draw gives depends on its number alone, so the state is that number, and the
    numbers before it that were passed over by :meth:`use`; these are drawn first.

    Args:
        dataset: The prompts.
        shuffle: Whether the order is random.
        seed: Seed of the order.

    Raises:
        ValueError: The data set is empty.
    """

    def __init__(self, dataset: PromptDataset, *, shuffle: bool = True, seed: int = 0) -> None:
        self._dataset = dataset
        self._shuffle, self._seed = shuffle, seed
        self._draws = Draws(len(dataset), shuffle=shuffle, seed=seed)
        self._next = 0  # every number from here on is free
        self._passed_over: list[int] = []  # free numbers before it, ascending

    @property
    def drawn(self) -> int:
        """Prompts drawn so far."""
        return self._next - len(self._passed_over)

    @property
    def epoch(self) -> float:
        """How often the data set has been drawn."""
        return self.drawn / len(self._dataset)

    def take(self, n: int) -> list[tuple[int, Prompt]]:
        """The next ``n`` prompts with the numbers of their draws; epochs follow each other."""
        taken = self.coming(n)
        self.use(draw for draw, _ in taken)
        return taken

    def coming(self, n: int) -> list[tuple[int, Prompt]]:
        """What :meth:`take` would give, without drawing it."""
        draws = self._passed_over[:n]
        draws += range(self._next, self._next + n - len(draws))
        return [(draw, self.at(draw)) for draw in draws]

    def longest(self, drawn: Iterable[tuple[int, Prompt]]) -> list[tuple[int, Prompt]]:
        """The same draws, each with the longest prompt, rolled: equal ones are computed once."""
        found = max(self._dataset, key=lambda prompt: len(prompt.tokens))
        return [
            (draw, replace(found, tokens=np.roll(found.tokens, number)))
            for number, (draw, _) in enumerate(drawn)
        ]

    def use(self, draws: Iterable[int]) -> None:
        """Note that some of the :meth:`coming` prompts are drawn; those passed over come again.

        Args:
            draws: Their numbers, in any order.

        Raises:
            ValueError: One was drawn before.
        """
        for draw in draws:
            if draw >= self._next:
                self._passed_over.extend(range(self._next, draw))
                self._next = draw + 1
                continue
            place = bisect_left(self._passed_over, draw)
            if self._passed_over[place : place + 1] != [draw]:
                raise ValueError(f"draw {draw} was drawn before")
            del self._passed_over[place]

    def at(self, draw: int) -> Prompt:
        """The prompt of a draw, past or future."""
        return self._dataset[self._draws.row(draw)]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what the number refers to."""
        return {
            "drawn": self.drawn,
            "passed_over": list(self._passed_over),
            "dataset_sha256": self._dataset.sha256,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            CheckpointError: The prompts, the seed or the kind of order have changed since.
        """
        own = self.state_dict()
        changed = {
            "the prompts": ("dataset_sha256", "restore the files, tokenizer and length"),
            "shuffle": ("shuffle", f"the checkpoint has {state['shuffle']}"),
            "the seed of the order": ("seed", f"the checkpoint has {state['seed']}"),
        }
        for name, (key, hint) in changed.items():
            if state[key] != own[key]:
                raise CheckpointError(
                    f"{name} changed after the checkpoint was written, so that prompts would be "
                    f"repeated or missed: {hint}, or begin a new run from its weights"
                )
        self._passed_over = [int(draw) for draw in state.get("passed_over", ())]
        self._next = int(state["drawn"]) + len(self._passed_over)
