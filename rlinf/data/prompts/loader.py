"""The order in which a data set is gone through: a function of a seed and of numbers alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.errors import CheckpointError


class Draws:
    """Epoch after epoch without end; each shuffled epoch has an order of its own.

    Which of the ``rows`` a draw gives depends on seed and number of the draw alone, so that neither
    a resumed run nor another placement changes what a step is trained on.
    """

    def __init__(self, rows: int, *, shuffle: bool = True, seed: int = 0) -> None:
        if rows < 1:
            raise ValueError("there is no row to draw")
        self._rows, self._shuffle, self._seed = rows, shuffle, seed
        self._order: tuple[int, np.ndarray] | None = None

    def row(self, draw: int) -> int:
        """The row of a draw, past or future."""
        epoch, position = divmod(draw, self._rows)
        if not self._shuffle:
            return position
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = (epoch, generator.permutation(self._rows))
        return int(self._order[1][position])

    def batch(self, step: int, size: int) -> np.ndarray:
        """[size] int64, rows of the global batch of a step, from 0; epochs follow each other."""
        return np.array([self.row(step * size + i) for i in range(size)], np.int64)


class PromptLoader:
    """Draws prompts, each once per epoch, at least one.

    Which prompt a draw gives depends on its number alone, so the state is that number, and the
    numbers before it that were passed over by :meth:`use`; these are drawn first.
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
        return [(draw, found.rolled(number)) for number, (draw, _) in enumerate(drawn)]

    def use(self, draws: Iterable[int]) -> None:
        """Note that some of the :meth:`coming` draws are drawn; those passed over come again.

        They come in any order; ValueError for one that was drawn before.
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
        """Go on from :meth:`state_dict`; CheckpointError where prompts or order have changed."""
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
