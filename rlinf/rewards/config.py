"""The section of a recipe that says what completions are worth, and which of them are right.

Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.dump import to_data
from rlinf.config.named_files import fingerprint, named_files
from rlinf.config.nearest import join_choices
from rlinf.config.reference import file_of
from rlinf.rewards.protocol import REGISTRY, AnswerConfig, RewardFunctionConfig

DEADLINE_MARGIN = 5.0
"""Seconds between a function's own limit and the deadline of the process that runs it."""


class RewardConfig(StrictModel):
    """What a completion is worth: the weighted sum of several functions."""

    functions: dict[str, Annotated[RewardFunctionConfig, Component(REGISTRY)]] = Field(
        min_length=1, max_length=255
    )
    """The functions by a name of your choice, under which each value is logged."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Processes that score."""
    deadline: float = Field(default=60.0, gt=0, le=1e9)
    """Seconds that scoring one sample, or comparing those of a group, may take; then the process
    is replaced, and the sample or the group is invalid."""
    start_deadline: float = Field(default=120.0, gt=0, le=1e9)
    """Seconds that a process may take until it is ready."""
    memory_mib: int | None = Field(default=4096, ge=256)
    """Address space of each process, in MiB; null: unbounded."""

    @model_validator(mode="after")
    def _check_deadline(self) -> Self:
        own = {name: function.longest_seconds for name, function in self.functions.items()}
        needed = sum(own.values()) + (DEADLINE_MARGIN if any(own.values()) else 0)
        if self.deadline < needed:
            limits = ", ".join(f"{name} {seconds:g} s" for name, seconds in own.items() if seconds)
            raise illegal(
                "deadline",
                f"is shorter than the functions' own limits ({limits}), so slow answers would be "
                "invalid where they should be wrong",
                hint=f"nearest: {needed:g}",
            )
        return self

    def unusable(self, answer: Any) -> str | None:
        """Why a function can score no completion of a prompt with this answer, after the name of
        the function; None: nothing is known against it."""
        for name, function in self.functions.items():
            try:
                function.check_answer(answer)
            except ValueError as error:
                return f"reward.functions.{name}: {error}"
        return None

    def specified(self) -> dict[str, Any]:
        """The functions as plain data, the same wherever their files lie: of `FILE.py:NAME` the
        file's name and a digest of what it holds."""
        functions: dict[str, Any] = to_data(self)["functions"]
        for key, path in named_files(self):
            section, name = functions[key.split(".")[1]], key.split(".")[-1]
            if file_of(str(section[name])) is not None:
                (digest,) = fingerprint(path).values()
                attribute = section[name].rpartition(":")[2]
                section[name] = f"{path.name}:{attribute} {digest[:12]}"
        return functions


class CorrectnessConfig(StrictModel):
    """The value of a reward from which on a completion counts as right."""

    correct_by: str | None = None
    """The function of `reward.functions` that decides, by its name; null: the only one, or the
    weighted sum of several."""
    correct_from: float = 0.5
    """Its value, before weighting, from which on a completion counts as right."""

    def decides(self, reward: RewardConfig) -> str | None:
        """The function whose value decides; None: the weighted sum, which that of a single function
        of weight 1 is, too."""
        names = list(reward.functions)
        weighted = len(names) == 1 and reward.functions[names[0]].weight != 1
        return names[0] if self.correct_by is None and weighted else self.correct_by

    def correctness_problems(
        self, reward: RewardConfig, section: str = ""
    ) -> Iterator[PydanticCustomError]:
        """Whether the functions of a recipe make clear what is right; ``section`` precedes keys."""
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
            return
        name = names[0] if len(names) == 1 else self.correct_by
        answer = reward.functions.get(name or "")
        if isinstance(answer, AnswerConfig):
            wrong, right = answer.value_of(False), answer.value_of(True)
            if not wrong < self.correct_from <= right:
                yield illegal(
                    f"{section}correct_from",
                    f"does not tell right from wrong: {name} gives {right:g} for a right answer "
                    f"and {wrong:g} for a wrong one",
                    hint=f"nearest: {(wrong + right) / 2:g}",
                )
