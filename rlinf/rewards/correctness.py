"""What tells right answers from wrong ones in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.nearest import join_choices
from rlinf.rewards.config import RewardConfig


class CorrectnessConfig(StrictModel):
    """The value of a reward from which on a completion counts as right."""

    correct_by: str | None = None
    """The function of `reward.functions` that decides, by its name; null: the weighted sum."""
    correct_from: float = 0.5
    """Its value, before weighting, from which on a completion counts as right."""

    def correctness_problems(
        self, reward: RewardConfig, section: str = ""
    ) -> Iterator[PydanticCustomError]:
        """Whether the functions of a recipe make clear what is right.

        Args:
            reward: The functions.
            section: In front of the keys.
        """
        names = list(reward.functions)
        if self.correct_by is not None:
            if self.correct_by not in names:
                yield illegal(
                    f"{section}correct_by",
                    f"there is no function {self.correct_by} in reward.functions",
                    hint=f"there are {join_choices(names)}",
                )
        elif len(names) > 1 and "correct_from" not in self.model_fields_set:
            yield illegal(
                f"{section}correct_by",
                f"is missing: the sum of {len(names)} functions does not say whether an answer is "
                "right",
                hint=f"the name of one, such as {names[0]}; or correct_from, for their sum",
            )
