"""Configuration of prompt sets; imports no torch, so that a recipe is checked in an instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import did_you_mean
from rlinf.data.tasks.base_config import TaskConfig
from rlinf.data.tasks.registry import REGISTRY
from rlinf.errors import ConfigError, in_section

if TYPE_CHECKING:
    from rlinf.data.prompts.dataset import PromptDataset, PromptSets
    from rlinf.data.prompts.encode import PromptTokenizer

BenchmarkName = Literal["aime24", "aime25", "math500", "gpqa_diamond"]
LongPrompts = Literal["skip", "truncate", "refuse"]
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv")
DEFAULT_MAX_BROKEN = 100


def check_file(path: Path, key: str) -> None:
    """Refuse a file that is not there or of an unknown kind.

    Raises:
        ConfigError: With the nearest file of the same folder.
    """
    path = path.expanduser()
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*") if entry.is_file()]
        hint = did_you_mean(path.name, siblings) if siblings else "is the path right?"
        raise ConfigError(f"there is no file {path}; {hint}", key=key)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{path.name} is of no known kind; one of {', '.join(SUFFIXES)}, by the end of its "
            "name",
            key=key,
        )


class RecordFilesConfig(StrictModel):
    """Records in files of JSON, JSON lines, Parquet or CSV."""

    train: tuple[Path, ...] = Field(min_length=1)
    """Files with what is trained on, read in this order."""
    validation: tuple[Path, ...] = ()
    """Files with what is only evaluated."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages with `role` and `content`."""
    broken_records: Literal["skip", "refuse"] = "skip"
    """Leave out records that cannot be read or lack a key, up to a bound; or refuse the first."""
    max_broken: int | None = Field(default=None, ge=0)
    """Broken records of one set that are left out; more are refused. null: 100."""
    limit: int | None = Field(default=None, ge=1)
    """Train on the first so many records alone; null: on all."""
    validation_limit: int | None = Field(default=None, ge=1)
    """Evaluate on the first so many records alone; null: on all."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.broken_records == "refuse" and self.max_broken is not None:
            raise illegal(
                "max_broken", "has no effect with broken_records: refuse", hint="write null"
            )
        if self.validation_limit is not None and not self.validation:
            raise illegal("validation_limit", "there are no validation files", hint="write null")
        both = set(self.train) & set(self.validation)
        if both:
            raise illegal(
                "validation", f"{sorted(map(str, both))[0]} is trained on", hint="other files"
            )
        return self

    @property
    def bound(self) -> int:
        """Broken records of one set that are left out."""
        if self.broken_records == "refuse":
            return 0
        return DEFAULT_MAX_BROKEN if self.max_broken is None else self.max_broken

    def check(self) -> None:
        """Look for the files."""
        for path in self.train:
            check_file(path, "train")
        for path in self.validation:
            check_file(path, "validation")


class FilesConfig(RecordFilesConfig):
    """Prompts in files, with the answers that rewards are given."""

    answer_key: str = "solutions"
    """Key of the reference answer: a text, a number, a list of such, or what the reward asks
    for. A text or number becomes a list of one."""
    level_key: str | None = None
    """Key of a whole number that says how difficult the prompt is; null: none."""


class EncodingConfig(StrictModel):
    """How prompts become tokens."""

    apply_chat_template: bool = False
    """Put the prompt, a text or messages, into the tokenizer's chat template, up to where the
    assistant begins; otherwise the prompt is a text and is taken as it is."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Tokens of the longest prompt."""
    long_prompts: LongPrompts = "skip"
    """Leave out longer prompts, keep their first tokens, or refuse the set."""


class PromptDataConfig(EncodingConfig):
    """Where prompts come from, files or a generated task, and in which order they are drawn."""

    files: FilesConfig | None = None
    """Prompts in files."""
    task: Annotated[TaskConfig, Component(REGISTRY)] | None = None
    """A generated set instead of files; its held-out prompts are those of evaluation."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a random order."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.files is None and self.task is None:
            raise illegal(
                "files", "no prompts are named", hint="write `files` or `task`, for example "
                "task.type: sorting",
            )  # fmt: skip
        if self.files is not None and self.task is not None:
            raise illegal("task", "takes the place of `files`", hint="write one of the two")
        return self

    @property
    def validates(self) -> bool:
        """Whether there are prompts of which an evaluation can be made."""
        return self.files is None or bool(self.files.validation)

    def build(self, tokenizer: PromptTokenizer) -> PromptSets:
        """Read or generate the prompts, and tokenise them.

        Raises:
            ConfigError: Nothing is left, or a record or prompt is refused.
            MissingPackageError: A file is Parquet and pyarrow is not installed.
        """
        from rlinf.data.prompts.build import build_sets

        return build_sets(self, tokenizer)

    def check(self) -> None:
        """Look for the files, or generate the task."""
        for name, section in (("files", self.files), ("task", self.task)):
            if section is not None:
                with in_section(name):
                    section.check()


class BenchmarkConfig(EncodingConfig):
    """A published benchmark in a local file, as its publishers distribute it."""

    format: BenchmarkName
    """Which benchmark the file holds; it says which keys are read and how questions are put."""
    path: Path
    """The file."""
    apply_chat_template: bool = True
    """Put the question into the tokenizer's chat template, or take it as it is."""
    long_prompts: LongPrompts = "refuse"
    """Leave out longer prompts, keep their first tokens, or refuse the set."""
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
        """Read the questions, and tokenise them.

        Raises:
            ConfigError: The file is not of the format, or a prompt is too long.
        """
        from rlinf.data.prompts.benchmarks import read_benchmark

        return read_benchmark(self, tokenizer)

    def check(self) -> None:
        """Look for the file."""
        check_file(self.path, "path")
