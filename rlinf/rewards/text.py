"""Where the answer stands in a completion, and the rewards that look at nothing but its text."""

from __future__ import annotations

import math
import re
import string
import textwrap
from bisect import bisect
from decimal import Decimal
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.rewards.protocol import AnswerConfig, RewardFunctionConfig, RewardInput

_BOXED = re.compile(r"\\f?boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what a backslash stands before, as that is no brace that groups."""
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPENING = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")
_CLOSING = re.compile(r"([ \t]*)([`~]{3,})[ \t]*")
_PYTHON = re.compile(r"\s*(?:py|python(?:3(?:\.\d+)?)?)(?!\S)", re.IGNORECASE)
"""The first word behind a fence, which says the language; others may follow."""
_LOOSE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_SIGNS = str.maketrans({"−": "-", "“": '"', "”": '"', "‘": "'", "’": "'"})
_SIGNED = re.compile(r"(?<![\w)\]}])-\s*(?:\$\s*)?(?=\.?\d)")
_RELATIONS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "⩵"}
_RELATION = re.compile(
    r"(?<!\s)\s*(?:(?<![<>=!])[<>!]=(?![<>=])|[≤≥≠])\s*|(?<=[\w)])\s*==\s*(?=[\w\\(.-])"
)
"""One of two marks becomes one sign, which is no punctuation; ``== Title ==`` has none."""
_OPERATOR = re.compile(r"(?:(?<=[\w)])|(?<=\d!))\s*([<>=])\s*(?=[\w\\(.-])")
_FRACTION = re.compile(r"(?<=\d)\s*/\s*(?=\d)")
_LISTED = re.compile(r"(?<=\w),(?=-?\.?\w)(?!(?<=\d,)\d{3}(?!\d))")
_DATED = re.compile(
    r"\b((?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?\s+\d{1,2}),(?=\s+\d{3,4}(?!\d))",
    re.IGNORECASE,
)
"""The comma between day and year, which makes no list of them."""
_ARTICLES = re.compile(r"\b(?:an|the)\b|\ba\b(?=\s+\w\w)", re.IGNORECASE)
"""``A`` before a single letter is an answer beside another one."""
_MARKS = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))"  # of thousands
    r"|(?<![\w+])\++|(?<![\d!])!+"  # at once, as each would be kept for the one before it
    r"|(?!(?<=\d)[.,/:*^-]\d)(?!(?<!\w)-\.?\d)(?!(?<!\w)\.\d)(?!(?<=\d[eE])-\d)"
    r"(?!(?<=\d),\s+-?\.?\d)(?!(?<=[\w+])\+)(?!(?<=[\d!])!)(?!(?<!\w)-[a-z√\\(])"
    r"(?!(?:(?<=[\w)])|(?<=\d!))[<>=][\w\\(.-])"
    rf"[{re.escape(string.punctuation)}]"
)
"""Punctuation that is no part of a number, a list of those, a factorial, or a relation."""
_PASSES = 8
"""Marks that a mark belongs to are gone after fewer; more would be work that a model decides on."""
_TOO_MANY_TAGS = 0.25


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{…}`` holds, or None if there is none.

    Braces inside are matched; a box that the end of the text cuts off does not count.
    """
    starts = {match.end() for match in _BOXED.finditer(text)}
    # In one pass, as a model may write thousands of boxes that it never closes.
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for mark in _BRACES.finditer(text, min(starts) - 1) if starts else ():
        if mark.group() == "{":
            opened.append(mark.end())
        elif mark.group() == "}" and opened:
            start = opened.pop()
            if start in starts and (last is None or start > last[0]):
                last = start, mark.start()
    return None if last is None else text[slice(*last)]


def last_answer(text: str) -> str | None:
    """What the last ``<answer>…</answer>`` holds, or None if there is none."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def behind_thoughts(text: str) -> str:
    """What stands behind the last ``</think>``; all of a text that has none."""
    return text.rpartition("</think>")[2]


def last_line(text: str) -> str | None:
    """The last line that is not empty, or None if all are."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), None)


def code_block(text: str) -> str | None:
    """The last fenced block of Python, or without one the last fenced block of any kind."""
    blocks = _fenced(text) or _LOOSE.findall(text)
    python = [code for info, code in blocks if _PYTHON.match(info)]
    found = next(reversed(python or [code for _, code in blocks]), None)
    return None if found is None else textwrap.dedent(found)


def _fenced(text: str) -> list[tuple[str, str]]:
    """What stands behind the first fence of each block, and what between its fences.

    These are alike: what is indented further, as in a docstring, ends none. Looks at a line once,
    not once for each fence above it, as a model may write thousands that it never closes.
    """
    lines = text.split("\n")
    ends: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        if mark := _CLOSING.fullmatch(line):
            ends.setdefault(mark[1], []).append((number, mark[2]))
    alike: dict[tuple[str, str], list[int]] = {}
    blocks, behind = [], 0
    for number, line in enumerate(lines):
        mark = _OPENING.fullmatch(line)
        if mark is None or number < behind:
            continue
        indent, fence, info = mark.groups()
        if (indent, fence) not in alike:
            found = [end for end, run in ends.get(indent, ()) if run.startswith(fence)]
            alike[indent, fence] = found
        later = alike[indent, fence]
        if (place := bisect(later, number)) < len(later):
            code = "".join(f"{each}\n" for each in lines[number + 1 : later[place]])
            blocks.append((info, code))
            behind = later[place] + 1
    return blocks


def references(answer: object) -> list[str]:
    """The references of an answer: a text, a number, or a list of such; ValueError for all else,
    and for a text of white space alone, which an empty answer would equal.

    A whole number is one without a fraction as well, ``5`` for 5.0: where one of a column is
    missing, pandas writes all of them so.
    """
    items = answer if isinstance(answer, list | tuple) else [answer]
    found = [
        _written(item)
        for item in items
        if isinstance(item, int | float) or (isinstance(item, str) and item.strip())
    ]
    if not found or len(found) != len(items):
        raise ValueError(f"the answer is no text, number or list of such: {str(answer)[:100]!r}")
    return [text for texts in found for text in texts]


def _written(item: str | int | float) -> list[str]:
    """A reference as texts; a number with all its digits, as nobody answers with 1e-05."""
    if not isinstance(item, float) or not math.isfinite(item):
        return [str(item)]
    digits = repr(item) if "e" not in repr(item) else f"{Decimal(repr(item)):f}"
    return [digits, digits.removesuffix(".0")] if digits.endswith(".0") else [digits]


def normalize(
    text: str,
    *,
    lower: bool = True,
    strip_punctuation: bool = True,
    strip_articles: bool = True,
    strip_whitespace: bool = True,
) -> str:
    """A text without what two equal answers may differ in (Rajpurkar et al. 2016, SQuAD).

    Other than there, relations and marks that belong to a number stay (a sign, a point, a fraction
    bar, a factorial, but no comma before three digits), and a step that would leave nothing is left
    out: an answer of nothing is none, and ``A`` is one.
    """
    if lower:
        text = text.lower()
    if strip_punctuation:
        for _ in range(_PASSES):  # a mark may have belonged to one that is gone
            before, text = text, _unless_empty(_without_marks(text), text)
            if text == before:
                break
    if strip_articles:
        text = _unless_empty(_ARTICLES.sub(" ", text), text)
    if strip_whitespace:
        text = " ".join(text.split())
    return text


def _without_marks(text: str) -> str:
    text = _RELATION.sub(_as_one_sign, _SIGNED.sub("-", text.translate(_SIGNS)))
    text = _FRACTION.sub("/", _OPERATOR.sub(r"\1", text))
    return _MARKS.sub("", _DATED.sub(r"\1", _LISTED.sub(", ", text)))


def _as_one_sign(relation: re.Match[str]) -> str:
    marks = relation[0].strip()
    return _RELATIONS.get(marks, marks)


def _unless_empty(text: str, instead: str) -> str:
    return text if text.strip() else instead


def _check_pattern(pattern: str, most_groups: int | None = None) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise illegal("pattern", f"is no regular expression: {error}") from error
    if most_groups is not None and groups > most_groups:
        raise illegal(
            "pattern", f"has {groups} groups; the answer is the only one", hint="use (?:…)"
        )


class ExactMatchConfig(AnswerConfig):
    """Is the answer the same text as one of the references?"""

    only_with: ClassVar = {"pattern": "extract: pattern", "max_tags": "extract: answer_tag"}
    type: Literal["exact_match"] = "exact_match"
    """Which reward this section configures."""
    extract: Literal["answer_tag", "pattern", "last_line", "everything"] = "answer_tag"
    """Where the answer stands: in the last `<answer>…</answer>` behind `</think>`, where `pattern`
    matches last, in the last line that is not empty, or the completion is the answer."""
    pattern: str | None = None
    """Regular expression; its group, or all that it matches, is the answer."""
    lower: bool = True
    """Take capital letters for small ones."""
    strip_punctuation: bool = True
    """Leave out punctuation, but for that within a number."""
    strip_articles: bool = True
    """Leave out a, an and the."""
    strip_whitespace: bool = True
    """Take any run of white space for one space, and none at the ends."""
    found_value: float | None = None
    """Value of a wrong answer that stands where it should; null: `min_value`."""
    max_tags: int = Field(default=10, ge=1)
    """A right answer is worth a quarter where more than so many `<answer>` tags were opened."""

    @model_validator(mode="after")
    def _check_extraction(self) -> Self:
        if self.extract == "pattern" and self.pattern is None:
            raise illegal("pattern", "extract: pattern needs one", hint="for example 'is (\\d+)'")
        if self.pattern is not None:
            _check_pattern(self.pattern, most_groups=1)
        if self.found_value is not None and self.found_value > self.max_value:
            raise illegal(
                "found_value",
                f"a wrong answer must not be worth more than a right one, {self.max_value}",
                hint=f"nearest: {self.max_value}",
            )
        return self

    def check_answer(self, answer: Any) -> None:
        """See :func:`references`."""
        references(answer)

    def score(self, sample: RewardInput) -> float:
        """`max_value` for a reference, `found_value` for another answer, `min_value` for none."""
        wanted = {self._normalized(reference) for reference in references(sample.answer)}
        answer = self._extracted(sample.completion)
        if answer is None:
            return self.value_of(False)
        if self._normalized(answer) not in wanted:
            wrong = self.min_value if self.found_value is None else self.found_value
            return wrong * self.scale
        tags = sample.completion.count("<answer>") if self.extract == "answer_tag" else 0
        return self.value_of(True) * (_TOO_MANY_TAGS if tags > self.max_tags else 1.0)

    def _extracted(self, text: str) -> str | None:
        if self.extract == "answer_tag":
            return last_answer(behind_thoughts(text))
        if self.pattern is None:
            return last_line(text) if self.extract == "last_line" else text
        pattern = re.compile(self.pattern, re.DOTALL)
        found = list(pattern.finditer(text))
        return found[-1].group(pattern.groups) if found else None

    def _normalized(self, text: str) -> str:
        return normalize(
            text,
            lower=self.lower,
            strip_punctuation=self.strip_punctuation,
            strip_articles=self.strip_articles,
            strip_whitespace=self.strip_whitespace,
        )


class FormatConfig(AnswerConfig):
    """Has the completion the wanted form?"""

    only_with: ClassVar = {"think_in_prompt": "form: think_answer | think"}
    type: Literal["format"] = "format"
    """Which reward this section configures."""
    form: Literal["think_answer", "think", "answer", "boxed", "pattern"] = "think_answer"
    """`<think>…</think>` and then `<answer>…</answer>`; `<think>…</think>` and then text; one
    `<answer>…</answer>` at the end; a `\\boxed{…}` behind the thoughts; or what `pattern` matches
    as a whole."""
    pattern: str | None = None
    """Regular expression; a dot matches line ends."""
    think_in_prompt: bool = False
    """The prompt ends in `<think>`, so the completion does not open it."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.form == "pattern") != (self.pattern is not None):
            raise illegal("pattern", "goes together with form: pattern", hint="write both or none")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        return self

    def score(self, sample: RewardInput) -> float:
        """`max_value` for the wanted form, `min_value` for any other."""
        text = f"<think>{sample.completion}" if self.think_in_prompt else sample.completion
        if self.pattern is not None:
            right = re.fullmatch(self.pattern, text, re.DOTALL) is not None
        elif self.form == "boxed":
            right = last_boxed(behind_thoughts(text)) is not None
        else:
            right = has_form(text, think="think" in self.form, answer="answer" in self.form)
        return self.value_of(right)


def has_form(text: str, *, think: bool, answer: bool) -> bool:
    """Whether each wanted section stands there once, in this order, with something in it.

    A text that thinks begins with its thoughts; one that answers ends with its answer. Between the
    two only white space may stand; without an answer section, any text that is not empty follows.
    """
    rest = text.strip()
    if think:
        thoughts = _section(rest, "think")
        if thoughts is None:
            return False
        rest = rest[thoughts:].strip()
    if not answer:
        return bool(rest)
    if not think:
        rest = rest[max(rest.find("<answer>"), 0) :]
    return _section(rest, "answer") == len(rest)


def _section(text: str, name: str) -> int | None:
    """Where the section that a text begins with ends; None without the only one of it."""
    opening, closing = f"<{name}>", f"</{name}>"
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return None
    end = text.find(closing)
    return end + len(closing) if text[len(opening) : end].strip() else None


class LengthConfig(RewardFunctionConfig):
    """Soft penalty of over-long completions (Yu et al. 2025, DAPO, eq. 13)."""

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

    def score(self, sample: RewardInput) -> float:
        """R_length in [−1, 0] (arXiv 2503.14476, eq. 13).

        0 up to L_max − L_cache tokens, then linear to −1 at L_max, −1 beyond.
        """
        free = self.max_length - self.cache_length
        return max(min((free - sample.num_tokens) / self.cache_length, 0.0), -1.0)
