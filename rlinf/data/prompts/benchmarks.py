"""Published benchmarks, read from the files that their publishers distribute.

Distributions differ in the names of their keys; the first that a record has is taken. A broken
record is an error, because a score on a part of a benchmark is no score on it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.component import illegal
from rlinf.config.nearest import did_you_mean
from rlinf.data.prompts.config import EncodingConfig, LongPrompts, check_file
from rlinf.data.prompts.dataset import PromptDataset, PromptTokenizer, encode_prompts
from rlinf.data.prompts.prompt_files import (
    Notes,
    RawPrompt,
    UnusableRecordError,
    raw_prompt,
    read_prompts,
)
from rlinf.errors import ConfigError

MATH_TEMPLATE = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
CHOICE_TEMPLATE = (
    "{question}\n\n{choices}\n\nReason step by step, and put the letter of the right choice "
    "within \\boxed{}."
)
_LETTERS = "ABCD"


@dataclass(frozen=True, kw_only=True)
class BenchmarkFormat:
    """What the records of a benchmark look like.

    Args:
        questions: Names that the key of the question has.
        answers: Names that the key of the answer has.
        distractors: Keys of the wrong choices; empty where the answer is free.
        level: Key of the level of difficulty, if records have one.
        template: How the question is put.
    """

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    distractors: tuple[str, ...] = ()
    level: str | None = None
    template: str = MATH_TEMPLATE


BenchmarkName = Literal["aime24", "aime25", "math500", "gpqa_diamond"]
_AIME = BenchmarkFormat(
    questions=("problem", "Problem", "question", "Question"),
    answers=("answer", "Answer", "expected_answer"),
)
BENCHMARKS: Mapping[BenchmarkName, BenchmarkFormat] = {
    "aime24": _AIME,
    "aime25": _AIME,
    "math500": BenchmarkFormat(questions=("problem",), answers=("answer",), level="level"),
    "gpqa_diamond": BenchmarkFormat(
        questions=("Question", "question"),
        answers=("Correct Answer",),
        distractors=tuple(f"Incorrect Answer {i}" for i in (1, 2, 3)),
        template=CHOICE_TEMPLATE,
    ),
}


class BenchmarkConfig(EncodingConfig):
    """A published benchmark in a local file, as its publishers distribute it."""

    only_with: ClassVar = {"seed": "format: gpqa_diamond"}

    format: BenchmarkName
    """Which benchmark the file holds; it says which keys are read and how questions are put."""
    path: Path
    """The file."""
    apply_chat_template: bool = True
    """Put the question into the tokenizer's chat template, or take it as it is."""
    long_prompts: LongPrompts = "refuse"
    """Leave out longer prompts, keep their first tokens (of plain texts alone), or refuse the
    set."""
    template: str | None = None
    """Prompt with `{question}` where the question goes, and `{choices}` where choices are; null:
    that of the format."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of choices."""
    limit: int | None = Field(default=None, ge=1)
    """Take the first so many questions alone; null: all."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template is None:
            return self
        for place in ("{question}", *(["{choices}"] if self.format == "gpqa_diamond" else [])):
            if place not in self.template:
                raise illegal("template", f"lacks {place}", hint="put it where it belongs")
        return self

    def build(self, tokenizer: PromptTokenizer) -> PromptDataset:
        """The questions in the order of the file, tokenised; ConfigError where one cannot be.

        Choices stand in an order that depends on the question and the seed; the answer is then the
        letter of the right one, and the text of a choice never is.
        """
        notes = Notes()
        raw = list(read_prompts([self.path], self._question, notes))
        self._refuse_broken(notes)
        dataset = encode_prompts(
            raw, tokenizer=tokenizer, config=self, notes=notes, limit=self.limit
        )
        self._refuse_broken(notes)
        if not len(dataset):
            raise ConfigError(f"{self.path} has no question", key="path")
        return dataset

    def check(self) -> None:
        """Look for the files."""
        super().check()
        check_file(self.path, "path")

    def _refuse_broken(self, notes: Notes) -> None:
        if notes.counts["broken"]:
            why = (
                f"{notes.counts['broken']} of {notes.counts['records']} records of {self.path} are "
                f"not of the format {self.format}"
            )
            raise ConfigError(notes.listed(why, "broken"), key="path")

    def _question(self, where: str, record: Mapping[str, Any], folder: Path) -> RawPrompt:
        del folder
        layout = BENCHMARKS[self.format]
        question, answer = _first(record, layout.questions), _first(record, layout.answers)
        level = layout.level if layout.level in record else None
        found = raw_prompt(where, record, question, answer, level)
        if not isinstance(found.content, str):
            raise UnusableRecordError(f"`{question}` is a text, not messages")
        template = layout.template if self.template is None else self.template
        text = template.replace("{question}", found.content.strip(), 1)
        if not layout.distractors:
            return replace(found, content=text)
        choices, letter = arrange_choices(
            found.content, _choices(record, answer, layout.distractors), seed=self.seed
        )
        text = text.replace("{choices}", choices, 1)
        return RawPrompt(where=where, content=text, answer=[letter])


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if name in record:
            return name
    others = did_you_mean(names[0], map(str, record), list_up_to=20)
    raise UnusableRecordError(f"has none of the keys {', '.join(names)}; {others}")


def _choices(record: Mapping[str, Any], answer: str, distractors: tuple[str, ...]) -> list[str]:
    found = []
    for key in (answer, *distractors):
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            raise UnusableRecordError(f"`{key}` holds no choice")
        found.append(value.strip())
    return found


def arrange_choices(question: str, choices: list[str], *, seed: int) -> tuple[str, str]:
    """Choices, the right one first, as lettered lines, and the letter of the right one.

    Their order depends on question and seed.
    """
    digest = hashlib.sha256(f"{seed}\n{question}".encode()).digest()
    order = list(range(len(choices)))
    random.Random(digest).shuffle(order)
    lines = [f"{letter}) {choices[i]}" for letter, i in zip(_LETTERS, order, strict=True)]
    return "\n".join(lines), _LETTERS[order.index(0)]
