"""Does the program in a completion pass the tests of its prompt?

The answer of a prompt is a mapping with one or both kinds of tests:

- ``pairs``: list of [standard input, expected output]; or ``inputs`` and ``outputs``, two lists.
- ``asserts``: list of statements that raise if they fail, such as ``assert add(1, 2) == 3``; with
  ``setup``, run before them, and ``entry_point``, the function that they call ``candidate``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.errors import ConfigError
from rlinf.rewards.protocol import AnswerConfig, RewardFunction, RewardInput
from rlinf.rewards.sandbox.host import Sandbox
from rlinf.rewards.sandbox.running import Limits, supervise
from rlinf.rewards.text import code_block

log = logging.getLogger(__name__)

_START = "import sys; sys.path.insert(0, '.'); from rlinf.rewards.grading.{0} import main; main()"
_VERDICT_BYTES = 4096
"""More than the verdict on a test may be, with the reason for it."""


class CodeConfig(AnswerConfig):
    """Does the program in the completion pass the tests?"""

    not_read = frozenset({"python"})

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
        try:
            sandbox = self.sandbox()
        except ConfigError as error:
            raise ConfigError(error.reason, key="python" if self.python else "type") from error
        sandbox.check()

    def check_answer(self, answer: Any) -> None:
        """See :func:`read_tests`."""
        read_tests(answer)

    def build(self) -> RewardFunction:
        """The tests; ConfigError where programs cannot be isolated."""
        return CodeReward(self)

    def sandbox(self) -> Sandbox:
        """In which programs run; ConfigError where their interpreter cannot be shown."""
        limits = Limits(
            cpu_seconds=self.cpu_seconds,
            wall_seconds=self.wall_seconds,
            memory_bytes=self.memory_mib * 2**20,
            processes=self.processes,
            scratch_bytes=self.scratch_mib * 2**20,
            output_bytes=self.output_kib * 2**10,
        )
        return Sandbox(limits, python=None if self.python is None else str(self.python))


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests of one prompt.

    Args:
        pairs: Standard input and expected output.
        asserts: Statements that raise if they fail.
        setup: Run before them.
        entry_point: The function that they may call ``candidate``.
    """

    pairs: tuple[tuple[str, str], ...]
    asserts: tuple[str, ...]
    setup: str
    entry_point: str | None

    def __len__(self) -> int:
        return len(self.pairs) + len(self.asserts)


def read_tests(answer: Any) -> Tests:
    """The tests that an answer describes; ValueError where it describes none.

    What is null counts as left out: a column of Parquet has the keys of all its rows in each.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("the answer is no mapping with `pairs` or `asserts`")
    answer = {key: value for key, value in answer.items() if value is not None}
    unknown = set(answer) - {"pairs", "inputs", "outputs", "asserts", "setup", "entry_point"}
    if unknown:
        raise ValueError(f"the answer has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    for key in ("pairs", "inputs", "outputs"):
        if not isinstance(answer.get(key, []), list | tuple):
            raise ValueError(f"`{key}` is a list")
    inputs, outputs = answer.get("inputs", []), answer.get("outputs", [])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    pairs = [*answer.get("pairs", []), *zip(inputs, outputs, strict=True)]
    if not all(map(_is_pair, pairs)):
        raise ValueError("a pair is a text for standard input and the expected output")
    asserts = answer.get("asserts", [])
    if not isinstance(asserts, list | tuple) or not all(isinstance(text, str) for text in asserts):
        raise ValueError("`asserts` is a list of statements")
    entry_point = answer.get("entry_point")
    if not isinstance(entry_point, str | None):
        raise ValueError(f"`entry_point` is the name of a function, not {entry_point!r}")
    if not pairs and not asserts:
        raise ValueError("the answer holds no tests")
    return Tests(
        pairs=tuple((first, second) for first, second in pairs),
        asserts=tuple(asserts),
        setup=str(answer.get("setup") or ""),
        entry_point=entry_point,
    )


def _is_pair(value: Any) -> bool:
    texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    return texts and len(value) == 2


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal but for white space at the end of lines and of the whole."""
    first, second = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected)
    )
    return first == second


class CodeReward:
    """`max_value` for a program that passes, `min_value` for none, for failing, for no program."""

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        self._sandbox = config.sandbox()
        self._sandbox.check()
        self._doubts: set[str] = set()
        grading = resources.files("rlinf.rewards.grading")
        self._modules = {
            f"rlinf/rewards/grading/{name}.py": grading.joinpath(f"{name}.py").read_text("utf-8")
            for name in ("values", "solution", "unit_tests")
        }

    def __call__(self, sample: RewardInput) -> float:
        """Run the program of a completion against the tests of its prompt."""
        config = self._config
        tests = read_tests(sample.answer)
        program = code_block(sample.completion)
        share = 0.0 if program is None else self._passed(program, tests) / len(tests)
        if config.value == "all":
            share = float(share == 1)
        return (config.min_value + share * (config.max_value - config.min_value)) * config.scale

    def _passed(self, program: str, tests: Tests) -> int:
        """Return how many tests a program passes; of all or nothing, no more than need be."""
        end = time.monotonic() + self._config.total_seconds
        passed = self._passed_asserts(program, tests) if tests.asserts else 0
        hopeless = self._config.value == "all" and passed < len(tests.asserts)
        for given, expected in () if hopeless else tests.pairs:
            if time.monotonic() >= end:
                break
            result = self._sandbox.run(program, stdin=given.encode())
            right = result.succeeded and same_output(
                result.output.decode(errors="replace"), expected
            )
            passed += right
            if not right and self._config.value == "all":
                break
        return passed

    def _passed_asserts(self, program: str, tests: Tests) -> int:
        """Return how many asserts a program passes, which runs apart from them."""
        described = {k: v for k, v in vars(tests).items() if k != "pairs"}
        requests_in, requests_out = os.pipe()
        replies_in, replies_out = os.pipe()
        ends = [requests_in, replies_out, replies_in, requests_out]
        start, limits = self._sandbox.start, self._sandbox.limits
        # Verdicts are nothing that the program prints: with its limit, many tests, or long reasons
        # of the program's own making, would cut them off.
        output = max(limits.output_bytes, _VERDICT_BYTES * len(tests.asserts))
        try:
            solution = start(
                ["-c", _START.format("solution")],
                files={**self._modules, "main.py": program},
                descriptors=(requests_in, replies_out),
            )
            grader = start(
                ["-c", _START.format("unit_tests")],
                files={**self._modules, "tests.json": json.dumps(described)},
                descriptors=(replies_in, requests_out),
                limits=replace(limits, output_bytes=output),
            )
            with solution as running, grader as testing:
                while ends:
                    os.close(ends.pop())
                supervise([running, testing], until=testing)
                result = testing.result()
        finally:
            for descriptor in ends:
                os.close(descriptor)
        verdicts = [json.loads(line) for line in result.output.splitlines()]
        for verdict in verdicts:
            if "unusable" in verdict:
                raise ValueError(verdict["unusable"])
            if (doubt := verdict.get("doubtful", "")) not in {"", *self._doubts}:
                self._doubts.add(doubt)
                log.warning("%s", doubt)
        return sum(verdict["passed"] for verdict in verdicts)
