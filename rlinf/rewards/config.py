"""Configuration of the rewards; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.errors import ConfigError, MissingPackageError, in_section
from rlinf.rewards.base_config import RewardFunctionConfig
from rlinf.rewards.registry import REGISTRY

DEADLINE_MARGIN = 5.0
"""Seconds between a function's own limit and the deadline of the process that runs it."""

Number = Annotated[float, Field(allow_inf_nan=False)]


class AnswerConfig(RewardFunctionConfig):
    """What rewards have in common that tell right from wrong."""

    max_value: Number = 1.0
    """Value of a right answer."""
    min_value: Number = 0.0
    """Value of a wrong answer."""
    scale: Number = 1.0
    """Factor of both."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_value <= self.min_value:
            raise illegal(
                "max_value",
                f"a right answer must be worth more than a wrong one, which is {self.min_value}",
                hint=f"nearest: {self.min_value + 1}",
            )
        return self


class MathConfig(AnswerConfig):
    """Is the final answer mathematically equal to one of the references?"""

    implementation = "rlinf.rewards.math_answer:MathReward"
    type: Literal["math"] = "math"
    """Which reward this section configures."""
    min_value: Number = -1.0
    """Value of a wrong answer."""
    require_boxed: bool = False
    """Take the answer from the last `\\boxed{…}` alone; otherwise, where there is none, from the
    last expression of the text."""
    tail: int = Field(default=2000, ge=1)
    """Characters at the end of a completion in which an answer without a box is looked for."""
    digits: int = Field(default=6, ge=1)
    """Decimal places to which numbers must agree."""
    seconds: float = Field(default=5.0, gt=0, le=3600)
    """Seconds for reading and comparing an answer; one that takes longer is wrong."""

    @property
    def longest_seconds(self) -> float:
        """As configured."""
        return self.seconds

    def check(self) -> None:
        """Look for the package that compares."""
        if find_spec("math_verify") is None:
            raise MissingPackageError("math_verify", "language", "the reward `math`")


def _check_pattern(key: str, pattern: str | None, groups: int | None = None) -> None:
    if pattern is None:
        return
    try:
        found = re.compile(pattern).groups
    except re.error as error:
        raise illegal(key, f"is no regular expression: {error}") from error
    if groups is not None and found > groups:
        raise illegal(key, f"has {found} groups; the answer is the only one", hint="use (?:…)")


class ExactMatchConfig(AnswerConfig):
    """Is the answer the same text as one of the references?"""

    implementation = "rlinf.rewards.exact_match:ExactMatchReward"
    type: Literal["exact_match"] = "exact_match"
    """Which reward this section configures."""
    extract: Literal["answer_tag", "pattern", "last_line", "everything"] = "answer_tag"
    """Where the answer stands: in the last `<answer>…</answer>`, where `pattern` matches last, in
    the last line that is not empty, or the completion is the answer."""
    pattern: str | None = None
    """Regular expression; its group, or all that it matches, is the answer."""
    lower: bool = True
    """Take capital letters for small ones."""
    strip_punctuation: bool = True
    """Leave out punctuation."""
    strip_articles: bool = True
    """Leave out a, an and the."""
    strip_whitespace: bool = True
    """Take any run of white space for one space, and none at the ends."""
    found_value: Number | None = None
    """Value of a wrong answer that stands where it should; null: `min_value`."""
    max_tags: int = Field(default=10, ge=1)
    """A right answer is worth a quarter where more than so many `<answer>` tags were opened."""

    @model_validator(mode="after")
    def _check_extraction(self) -> Self:
        if self.extract == "pattern" and self.pattern is None:
            raise illegal("pattern", "extract: pattern needs one", hint="for example 'is (\\d+)'")
        if self.extract != "pattern" and self.pattern is not None:
            raise illegal(
                "pattern", f"has no effect with extract: {self.extract}", hint="extract: pattern"
            )
        _check_pattern("pattern", self.pattern, 1)
        if self.found_value is not None and self.found_value > self.max_value:
            raise illegal(
                "found_value",
                f"a wrong answer must not be worth more than a right one, {self.max_value}",
                hint=f"nearest: {self.max_value}",
            )
        return self


class FormatConfig(AnswerConfig):
    """Has the completion the wanted form?"""

    implementation = "rlinf.rewards.text_format:FormatReward"
    type: Literal["format"] = "format"
    """Which reward this section configures."""
    form: Literal["think_answer", "think", "answer", "boxed", "pattern"] = "think_answer"
    """`<think>…</think>` and then `<answer>…</answer>`; `<think>…</think>` and then text; one
    `<answer>…</answer>` at the end; a `\\boxed{…}`; or what `pattern` matches as a whole."""
    pattern: str | None = None
    """Regular expression; a dot matches line ends."""
    think_in_prompt: bool = False
    """The prompt ends in `<think>`, so the completion does not open it."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.form == "pattern") != (self.pattern is not None):
            raise illegal(
                "pattern",
                "goes together with form: pattern",
                hint="write both or none",
            )
        _check_pattern("pattern", self.pattern)
        if self.think_in_prompt and not self.form.startswith("think"):
            raise illegal("think_in_prompt", f"has no effect with form: {self.form}", hint="false")
        return self


class LengthConfig(RewardFunctionConfig):
    """Soft penalty of over-long completions (Yu et al. 2025, DAPO, eq. 13)."""

    implementation = "rlinf.rewards.length:LengthReward"
    type: Literal["length"] = "length"
    """Which reward this section configures."""
    max_length: int = Field(ge=1)
    """L_max, tokens from which on the value is −1."""
    cache_length: int = Field(ge=1)
    """L_cache, tokens below `max_length` from which on the value falls from 0."""

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.cache_length > self.max_length:
            raise illegal(
                "cache_length",
                f"is longer than max_length = {self.max_length}",
                hint=f"nearest: {self.max_length}",
            )
        return self


class CodeConfig(AnswerConfig):
    """Does the program in the completion pass the tests?"""

    implementation = "rlinf.rewards.code_tests:CodeReward"
    type: Literal["code"] = "code"
    """Which reward this section configures."""
    value: Literal["all", "fraction"] = "all"
    """Right only if every test passes; or between wrong and right by the share that passes."""
    python: Path | None = None
    """Interpreter of the programs; null: the one of this project without its packages."""
    wall_seconds: float = Field(default=6.0, gt=0, le=3600)
    """Time of one run: of each pair of input and output, and of all asserts together."""
    total_seconds: float = Field(default=20.0, gt=0, le=3600)
    """Time of all runs of a sample; tests that are not reached have failed."""
    cpu_seconds: int = Field(default=5, ge=1)
    """Processor time of each process of a run."""
    memory_mib: int = Field(default=512, ge=64)
    """Memory of a run, in MiB."""
    processes: int = Field(default=16, ge=1, le=4096)
    """Processes and threads of a run at a time."""
    scratch_mib: int = Field(default=16, ge=1)
    """All files that a run writes, in MiB."""
    output_kib: int = Field(default=1024, ge=1)
    """What a run prints, in KiB; one that prints more is ended."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.total_seconds < self.wall_seconds:
            raise illegal(
                "total_seconds",
                f"is shorter than one run, wall_seconds = {self.wall_seconds}",
                hint=f"nearest: {self.wall_seconds}",
            )
        return self

    @property
    def longest_seconds(self) -> float:
        """All runs, the last one begun just before the end."""
        return self.total_seconds + self.wall_seconds

    def check(self) -> None:
        """Try whether this machine can isolate programs."""
        from rlinf.rewards.sandbox.host import Sandbox

        python = str(self.python) if self.python is not None else None
        try:
            sandbox = Sandbox(python=python)
        except ConfigError as error:
            raise ConfigError(error.reason, key="python" if python else "type") from error
        sandbox.check()


class FunctionConfig(RewardFunctionConfig):
    """A function of your own."""

    implementation = "rlinf.rewards.function:UserReward"
    type: Literal["function"] = "function"
    """Which reward this section configures."""
    function: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")
    """`package.module:name`, or `path/to/file.py:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function by name."""

    def check(self) -> None:
        """Look for the module; it is imported in the processes that score."""
        from rlinf.rewards.function import find_module

        find_module(self.function)


class RewardConfig(StrictModel):
    """What a completion is worth: the weighted sum of several functions."""

    functions: dict[str, Annotated[RewardFunctionConfig, Component(REGISTRY)]] = Field(
        min_length=1, max_length=255
    )
    """The functions by a name of your choice, under which each value is logged."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Processes that score."""
    deadline: float = Field(default=60.0, gt=0)
    """Seconds that scoring one sample may take; then its process is replaced, and the sample is
    invalid."""
    start_deadline: float = Field(default=120.0, gt=0)
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

    def check(self) -> None:
        """Let each function look for what it needs."""
        for name, function in self.functions.items():
            with in_section(f"functions.{name}"):
                function.check()
