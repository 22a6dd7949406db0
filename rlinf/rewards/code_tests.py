"""Does the program in a completion pass the tests of its prompt?

The answer of a prompt is a mapping with one or both kinds of tests:

- ``pairs``: list of [standard input, expected output]; or ``inputs`` and ``outputs``, two lists.
- ``asserts``: list of statements that raise if they fail, such as ``assert add(1, 2) == 3``; with
  ``setup``, run before them, and ``entry_point``, the function that they call ``candidate``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from rlinf.rewards.extraction import code_block
from rlinf.rewards.protocol import RewardFunction, RewardInput
from rlinf.rewards.sandbox.host import Sandbox, supervise
from rlinf.rewards.sandbox.limits import Limits

if TYPE_CHECKING:
    from rlinf.rewards.config import CodeConfig

_START = "import sys; sys.path.insert(0, '.'); from rlinf.rewards.grading.{0} import main; main()"


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
    """Return the tests that an answer describes.

    Raises:
        ValueError: It describes none.
    """
    if not isinstance(answer, Mapping):
        raise ValueError("the answer is no mapping with `pairs` or `asserts`")
    unknown = set(answer) - {"pairs", "inputs", "outputs", "asserts", "setup", "entry_point"}
    if unknown:
        raise ValueError(f"the answer has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    inputs, outputs = answer.get("inputs", []), answer.get("outputs", [])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    pairs = [*answer.get("pairs", []), *zip(inputs, outputs, strict=True)]
    if any(len(pair) != 2 or not all(isinstance(text, str) for text in pair) for pair in pairs):
        raise ValueError("a pair is a text for standard input and the expected output")
    asserts = answer.get("asserts", [])
    if not isinstance(asserts, list | tuple) or not all(isinstance(text, str) for text in asserts):
        raise ValueError("`asserts` is a list of statements")
    if not pairs and not asserts:
        raise ValueError("the answer holds no tests")
    return Tests(
        pairs=tuple((first, second) for first, second in pairs),
        asserts=tuple(asserts),
        setup=str(answer.get("setup") or ""),
        entry_point=answer.get("entry_point"),
    )


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal but for white space at the end of lines and of the whole."""
    first, second = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected)
    )
    return first == second


class CodeReward(RewardFunction):
    """`max_value` for a program that passes, `min_value` for none, for failing, for no program.

    Raises:
        ConfigError: Programs cannot be isolated here.
    """

    def __init__(self, config: CodeConfig) -> None:
        self._config = config
        limits = Limits(
            cpu_seconds=config.cpu_seconds,
            wall_seconds=config.wall_seconds,
            memory_bytes=config.memory_mib * 2**20,
            processes=config.processes,
            scratch_bytes=config.scratch_mib * 2**20,
            output_bytes=config.output_kib * 2**10,
        )
        python = str(config.python) if config.python is not None else None
        self._sandbox = Sandbox(limits, python=python)
        self._sandbox.check()
        self._modules = {
            f"rlinf/rewards/grading/{name}.py": _source(f"{name}.py")
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
        described = {
            "setup": tests.setup,
            "asserts": tests.asserts,
            "entry_point": tests.entry_point,
        }
        requests_in, requests_out = os.pipe()
        replies_in, replies_out = os.pipe()
        ends = [requests_in, replies_out, replies_in, requests_out]
        start = self._sandbox.start
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
        return sum(verdict["passed"] for verdict in verdicts)


def _source(name: str) -> str:
    return resources.files("rlinf.rewards.grading").joinpath(name).read_text(encoding="utf-8")
