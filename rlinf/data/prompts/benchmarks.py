"""Reads published benchmarks from the files that their publishers distribute.

Distributions of one benchmark differ in the names of their keys; the first that a record has is
taken. Nothing is left out: a broken record is an error, because a score on a part of a benchmark
is no score on it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.config.nearest import did_you_mean
from rlinf.data.prompts.dataset import PromptDataset
from rlinf.data.prompts.encode import PromptTokenizer, encode_prompts
from rlinf.data.prompts.fields import RawPrompt, RecordKeys, UnusableRecordError, raw_prompt
from rlinf.data.prompts.records import BrokenRecord, read_records
from rlinf.data.prompts.report import SHOWN, Notes
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.data.prompts.config import BenchmarkConfig, BenchmarkName

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


def read_benchmark(config: BenchmarkConfig, tokenizer: PromptTokenizer) -> PromptDataset:
    """The questions of a benchmark, in the order of its file.

    Choices stand in an order that depends on the question and the seed; the answer is then the
    letter of the right one, and the text of a choice never is.

    Raises:
        ConfigError: The file is not of the format, a record is broken, or a prompt is too long.
        MissingPackageError: The file is Parquet and pyarrow is not installed.
    """
    notes, raw = Notes(), []
    for record in read_records(config.path):
        notes.counts["records"] += 1
        if isinstance(record, BrokenRecord):
            notes.add("broken", record.where, record.reason)
            continue
        try:
            raw.append(_question(record.where, record.value, config))
        except UnusableRecordError as error:
            notes.add("broken", record.where, str(error))
    _refuse(notes, config)
    dataset = encode_prompts(
        raw, tokenizer=tokenizer, config=config, notes=notes, limit=config.limit
    )
    _refuse(notes, config)
    if not len(dataset):
        raise ConfigError(f"{config.path} has no question", key="path")
    return dataset


def _refuse(notes: Notes, config: BenchmarkConfig) -> None:
    if notes.counts["broken"]:
        raise ConfigError(
            f"{notes.counts['broken']} of {notes.counts['records']} records of {config.path} are "
            f"not of the format {config.format}:\n  " + "\n  ".join(notes.examples[:SHOWN]),
            key="path",
        )


def _question(where: str, record: Mapping[str, Any], config: BenchmarkConfig) -> RawPrompt:
    layout = BENCHMARKS[config.format]
    question, answer = _first(record, layout.questions), _first(record, layout.answers)
    level = layout.level if layout.level in record else None
    found = raw_prompt(where, record, RecordKeys(question, answer, level))
    if not isinstance(found.content, str):
        raise UnusableRecordError(f"`{question}` is a text, not messages")
    template = layout.template if config.template is None else config.template
    text = template.replace("{question}", found.content.strip(), 1)
    if not layout.distractors:
        return RawPrompt(where=where, content=text, answer=found.answer, level=found.level)
    choices, letter = arrange_choices(
        found.content, _choices(record, answer, layout.distractors), seed=config.seed
    )
    text = text.replace("{choices}", choices, 1)
    return RawPrompt(where=where, content=text, answer=[letter], level=None)


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
    """Put choices, the right one first, in an order that depends on question and seed.

    Returns:
        The lettered lines, and the letter of the right choice.
    """
    digest = hashlib.sha256(f"{seed}\n{question}".encode()).digest()
    order = list(range(len(choices)))
    random.Random(digest).shuffle(order)
    lines = [f"{letter}) {choices[i]}" for letter, i in zip(_LETTERS, order, strict=True)]
    return "\n".join(lines), _LETTERS[order.index(0)]
