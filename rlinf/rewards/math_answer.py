"""Is the final answer mathematically equal to a reference?

Needs the package math-verify, and the main thread, in which alone a signal can end a comparison.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from types import FrameType
from typing import Any, ClassVar, Literal

from pydantic import Field

from rlinf.errors import MissingPackageError
from rlinf.rewards.protocol import AnswerConfig, RewardFunction, RewardInput
from rlinf.rewards.text import behind_thoughts, last_answer, last_boxed, last_line, references

_AGAIN_SECONDS = 0.2
_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")
"""Of a text that says where its formulas are; a dollar of money has a backslash."""


_SIGNS = str.maketrans({
    "−": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "π": r"\pi ",
    "°": r"^\circ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "≤": r"\leq ", "≥": r"\geq ",
})  # fmt: skip
_DASH = re.compile(r"(?<![\w\d])–\s*(?=[\d.\\])")
_ROOT = re.compile(r"√\s*(\w+(?:\.\d+)?)")
_BRACKETS = re.compile(r"(√\s*)?\(|\)")
_DOLLAR = re.compile(r"(?<!\\)\\\$\s*(?=\.?\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(?<!\d,)(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w^]|\.\d)")
_MIXED = re.compile(
    r"(?<![\w.^/\\])(?<!\d,)(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})\s+([1-9]\d{0,8})/(\d{1,9})"
    r"(?![\w^/]|\.\d)"
)
"""A whole number and a fraction, where nothing beside them makes them anything else; of no more
digits than Python reads."""
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:!]|~|\s)\d{3})+(?!\d)")
"""A number in groups of thousands, with spaces of any kind between them."""
_MONEY = re.compile(r"(?<=\d)\s*(?:dollars?|cents?|euros?|pounds?|USD|EUR|GBP)\.?\s*$|[€£¥]")
"""A word of currency at the end of an answer, which would be a product of letters, or a sign."""
_BOLD = re.compile(r"(?<![\w)*])\*\*([^*]+)\*\*(?![\w(*])")
"""Of Markdown; one between two numbers is a power."""
_SPELLED = re.compile(
    r"(?<![\\A-Za-z])"
    r"(?:(?:sin|cos|tan|log|ln)(?=\s*[\d\\({^_]|\s+[A-Za-z](?![A-Za-z]))|pi(?![A-Za-z]))"
)
"""π or a function by its name, which would be a product of letters; no word before another one."""
_IN_TEXT = re.compile(r"\\(?:text|math|operatorname)")
_LEADING = re.compile(
    r"\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*"
    r"(?:\bis\b\s*:?|:)\s*",
    re.IGNORECASE,
)
_MOST_WORDS, _LONGEST_WORDS = 4, 60
"""Words and characters of an answer in words; a longer line is prose."""
_PERCENT = re.compile(r"\s*\\?%")
_WORD = re.compile(
    r"\s*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*([A-Za-z](?:\s*[A-Za-z])+)\s*\}?\s*"
)
"""Letters without an operator between them, as of a name, a word, or an order of choices."""
_NAMED = re.compile(r"\s*(?:m?\s*\\angle\b|\\(?:text|mathrm)\b|(?:[A-Z][A-Za-z]*|[a-z]{4,})\s*=)")
"""What names one thing by several letters, left of an equation: a length AB, an angle, a word."""
_SMALL = 1e-3
_Place = Literal["box", "tag", "tail"]


def _in_latex(text: str) -> str:
    """Signs and numbers as LaTeX has them."""
    text = _MIXED.sub(_one_fraction, _DOLLAR.sub("", _DASH.sub("-", text)))
    # A power is read within formulas alone, and is no whole number to what compares.
    text = _SCIENTIFIC.sub(_power if _MARKED.search(text) else _digits, text)
    return _ROOT.sub(r"\\sqrt{\1}", _roots_of_brackets(text)).translate(_SIGNS)


def _one_fraction(mixed: re.Match[str]) -> str:
    """2 3/4 as 11/4; that of a fraction above 1 is no mixed number."""
    whole, above, below = (int(part.replace(",", "")) for part in mixed.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}" if above < below else mixed.group()


def _power(number: re.Match[str]) -> str:
    return rf"{number[1]}\times10^{{{int(number[2])}}}"


def _digits(number: re.Match[str]) -> str:
    return f"{Decimal(number.group()):f}"


def _roots_of_brackets(text: str) -> str:
    """√(…) as LaTeX has it, up to the bracket that closes it."""
    pieces, opened = list(text), list[re.Match[str]]()
    for mark in _BRACKETS.finditer(text):
        if mark.group() != ")":
            opened.append(mark)
        elif opened and (root := opened.pop())[1]:
            pieces[root.start() : root.end()] = [r"\sqrt{", *[""] * (len(root.group()) - 1)]
            pieces[mark.start()] = "}"
    return "".join(pieces)


def _plain(answer: str) -> str:
    """An answer without bold and currency, and the groups of its numbers put together."""
    answer = _MONEY.sub("", _BOLD.sub(r"\1", answer))
    return _GROUPS.sub(lambda found: re.sub(r"\D", "", found.group()), answer)


def _formula(text: str) -> str:
    """A formula with the functions that it spells as LaTeX has them."""
    return text if _IN_TEXT.search(text) else _SPELLED.sub(r"\\\g<0>", text)


def _in_words(text: str) -> str:
    """The answer that a text without formulas may give in its last line, such as ``(B)``: without
    bold, the full stop and `the answer is`."""
    line = (last_line(text) or "").replace("**", "").strip()
    said = _LEADING.sub("", line, count=1).rstrip(".")
    is_short = len(said) <= _LONGEST_WORDS and len(said.split()) <= _MOST_WORDS
    return said if is_short else ""


def _percents(answer: str) -> list[str]:
    """An answer, and what it is without the sign: 12.5 % is an answer to `how many per cent`."""
    bare = _PERCENT.sub("", answer)
    return [answer] if bare == answer else [answer, bare]


def _pairs(references: list[Any], answers: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Readings to compare; where both have a sign of per cent, 0.5 % is not 50 %."""
    both = len(references) > 1 and len(answers) > 1
    return product(references[:1], answers[:1]) if both else product(references, answers)


def _word(reading: list[Any]) -> str | None:
    """The letters of an expression that is made of two or more and nothing else."""
    text = reading[-1] if reading else None
    found = _WORD.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else "".join(found[1].split()).casefold()


def _differ_though_small(reference: list[Any], answer: list[Any]) -> bool:
    """Whether two numbers are alike in their decimal places alone, as they are so small."""
    try:
        first, second = float(reference[0]), float(answer[0])
    except (TypeError, ValueError, IndexError, OverflowError):
        return False
    largest = max(abs(first), abs(second))
    return largest < _SMALL and abs(first - second) > _SMALL * largest


class MathConfig(AnswerConfig):
    """Is the final answer mathematically equal to one of the references?"""

    only_with: ClassVar = {"tail": "require_boxed: false"}
    imported = ("math_verify",)
    type: Literal["math"] = "math"
    """Which reward this section configures."""
    min_value: float = -1.0
    """Value of a wrong answer."""
    require_boxed: bool = False
    """Take the answer from the last `\\boxed{…}` alone; otherwise, where there is none, from the
    last `<answer>…</answer>`, or else from the last expression, or else, of a text without any,
    from the last line. What a model says up to the last `</think>` are thoughts, in which no answer
    is looked for."""
    tail: int = Field(default=2000, ge=1)
    """Characters at the end of a completion in which an answer without a box is looked for."""
    digits: int = Field(default=6, ge=1)
    """Decimal places to which numbers must agree; small ones also to three significant digits."""
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

    def check_answer(self, answer: Any) -> None:
        """See :func:`references`."""
        references(answer)

    def build(self) -> RewardFunction:
        """See the base class."""
        return MathReward(self)


class _OutOfTime(BaseException):
    """No subclass of Exception: the libraries below catch those and go on."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`_OutOfTime` in the main thread after so many seconds, again and again."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class MathReward:
    """`max_value` for an answer that equals any reference, `min_value` for all else."""

    def __init__(self, config: MathConfig) -> None:
        try:
            import math_verify
            from math_verify import grader
        except ImportError as error:
            raise MissingPackageError("math_verify", "language", "the reward `math`") from error
        # It warns that its own time limits are off; ours takes their place.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._config = config
        self._library, self._grader = math_verify, grader
        # All completions of a prompt have the same references.
        self._read_reference = lru_cache(maxsize=1024)(self._parse_reference)

    def __call__(self, sample: RewardInput) -> float:
        """Compare the final answer with the references."""
        wanted = [self._references(text) for text in references(sample.answer)]
        try:
            with _time_limit(self._config.seconds):
                answers = self._readings(*self._place(sample.completion))
                right = self._equals_any(answers, wanted)
        except _OutOfTime:
            right = False
        return self._config.value_of(right)

    def answer_in(self, completion: str) -> str | None:
        """The final answer as a completion writes it; None where it gives none, or where reading
        takes too long."""
        place, text = self._place(completion)
        if place == "tail":
            try:
                with _time_limit(self._config.seconds):
                    (found,) = self._readings(place, text)
            except _OutOfTime:
                return None
            text = found[-1] if len(found) > 1 else ""  # the text alone is no expression
        return " ".join(text.split()) or None

    def are_equal(self, answer: str, other: str) -> bool:
        """Whether two of :meth:`answer_in` are one answer; False where one cannot be read."""
        try:
            wanted = self._references(other)
            with _time_limit(self._config.seconds):
                return self._equals_any(self._readings("tag", answer), [wanted])
        except (ValueError, _OutOfTime):
            return False

    def _place(self, completion: str) -> tuple[_Place, str]:
        """Where a completion gives its answer, and what stands there."""
        config, said = self._config, behind_thoughts(completion)
        boxed = last_boxed(said)
        if boxed is not None or config.require_boxed:
            return "box", boxed or ""
        tagged = last_answer(said)
        if tagged is not None:
            return "tag", tagged[-config.tail :]
        return "tail", said[-config.tail :]

    def _readings(self, place: _Place, text: str) -> list[list[Any]]:
        """The expressions of what stands there, and those without the sign of per cent."""
        if place == "box":
            plain = _percents(_plain(text))
            return [self._parse(rf"\boxed{{{_formula(each)}}}") for each in plain]
        if place == "tag":
            return [self._read(each) for each in _percents(_plain(text))]
        return [self._parse(text) or self._read(_in_words(text))]

    def _references(self, text: str) -> list[list[Any]]:
        """The readings of a reference."""
        return [self._read_reference(each) for each in _percents(text)]

    def _equals_any(self, answers: list[list[Any]], wanted: list[list[list[Any]]]) -> bool:
        return any(
            self._are_equal(reference, answer)
            for readings in wanted
            for reference, answer in _pairs(readings, answers)
        )

    def _are_equal(self, reference: list[Any], answer: list[Any]) -> bool:
        words = _word(reference), _word(answer)
        if None not in words:
            return words[0] == words[1]  # and are no products, of which CAB is ABC
        equal = self._library.verify(
            reference, answer, float_rounding=self._config.digits, timeout_seconds=None
        )
        if not equal or _differ_though_small(reference, answer):
            return False
        return not self._is_one_side(reference, answer)

    def _is_one_side(self, reference: list[Any], answer: list[Any]) -> bool:
        """Whether an answer is one side alone of an equation: 5 says all of x = 5, f(x) = 5 or
        AB = 5, and not of a + b = 5."""
        grader, equation = self._grader, reference[0]
        if not grader.is_assignment_relation(equation) or grader.is_equation(answer[0]):
            return False
        left = grader.take_first_relation(equation).lhs
        named = left.is_Symbol or left.is_Function or _NAMED.match(str(reference[-1]))
        return not named

    def _parse(self, text: str) -> list[Any]:
        found: list[Any] = self._library.parse(_in_latex(text), parsing_timeout=None)
        return found

    def _read(self, text: str) -> list[Any]:
        """The expressions of text with marks, or of a bare formula."""
        found = [] if _MARKED.search(text) else self._parse(f"${_formula(text.strip())}$")
        return found or self._parse(text)

    def _parse_reference(self, text: str) -> list[Any]:
        """The expressions of a reference: of text with marks, or of a bare formula."""
        try:
            with _time_limit(self._config.seconds):
                found = self._read(_plain(text))
        except _OutOfTime as error:
            raise ValueError(f"reading the reference {text[:100]!r} takes too long") from error
        if not found:
            raise ValueError(f"the reference {text[:100]!r} holds no mathematical expression")
        return found
