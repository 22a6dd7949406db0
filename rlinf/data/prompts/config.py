"""Prompt sets from files or from a generated task: their sections, and how they are built.

Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import Component, illegal
from rlinf.config.nearest import nearest_names
from rlinf.data.pictures import PictureReader
from rlinf.data.prompts.dataset import (
    BATCH,
    DATE,
    PromptDataset,
    PromptSets,
    PromptTokenizer,
    encode_prompts,
)
from rlinf.data.prompts.pictures import sources_of
from rlinf.data.prompts.prompt_files import (
    Notes,
    RawPrompt,
    check_records,
    columns_of,
    first_prompts,
    raw_prompt,
    read_prompts,
    value_or_why,
)
from rlinf.data.tasks import REGISTRY, PromptItem, PromptTask
from rlinf.errors import ConfigError, in_section, sought

Part = Literal["train", "validation"]
LongPrompts = Literal["skip", "truncate", "refuse"]
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv")
DEFAULT_MAX_BROKEN = 100
_FIRST = 20  # records of a file that are looked at before a run starts
_OWN_ARGUMENTS = {
    "conversation", "chat_template", "tokenize", "add_generation_prompt", "return_dict",
    "return_tensors", "continue_final_message", "strftime_now",
}  # fmt: skip


def check_file(path: Path, key: str) -> None:
    """Refuse a file that is not there, with the nearest of its folder, or of an unknown kind."""
    path = path.expanduser()
    if not path.is_file():
        found = [each for each in path.parent.glob("*") if each.suffix.lower() in SUFFIXES]
        siblings = {each.stem: each.name for each in found}
        close = nearest_names(path.stem, siblings, count=1)
        hint = f"did you mean `{siblings[close[0]]}`?" if close else "is the path right?"
        raise ConfigError(f"there is no file {sought(path)}; {hint}", key=key)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{path.name} is of no known kind; one of {', '.join(SUFFIXES)}, by the end of its "
            "name",
            key=key,
        )


class RecordFilesConfig(StrictModel, ABC):
    """Records in files of JSON, JSON lines, Parquet or CSV."""

    only_with: ClassVar = {
        "max_broken": "broken_records: skip",
        "validation_limit": "validation",
        "max_image_tokens": "image_key",
    }

    train: tuple[Path, ...] = Field(min_length=1)
    """Files with what is trained on, read in this order."""
    validation: tuple[Path, ...] = ()
    """Files with what is only evaluated."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages with `role` and `content`."""
    image_key: str | None = None
    """Key of the pictures of a prompt: one or a list, each the path of a file (from the folder of
    the file with the record), its bytes, a mapping with `bytes` or `path`, or a `data:` URL. They
    go where the prompt has `<image>`, or before it. `a.b` is the key `b` in what `a` holds; null:
    prompts have none."""
    max_image_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a picture may become, else it is made smaller; null: as the model's settings of
    pictures say."""
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
        both = set(self.train) & set(self.validation)
        if both:
            raise illegal(
                "validation", f"{sorted(map(str, both))[0]} is trained on", hint="other files"
            )
        return self

    def part(self, name: Part) -> tuple[tuple[Path, ...], int | None]:
        """Files of a part, and how many records are taken of them."""
        if name == "train":
            return self.train, self.limit
        return self.validation, self.validation_limit

    @property
    def other_columns(self) -> tuple[str, ...]:
        """Keys of what else a prompt carries."""
        return ()

    @property
    @abstractmethod
    def other_keys(self) -> tuple[str, str | None]:
        """Keys of answer and, if there is one, level."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all that is read of a record."""
        named = self.prompt_key, *self.other_keys, self.image_key, *self.other_columns
        return tuple(dict.fromkeys(key for key in named if key is not None))

    def read(self, name: Part, notes: Notes) -> Iterator[RawPrompt]:
        """The prompts of a part as they are asked for, see :func:`read_prompts`; refuses too many
        broken ones, and a key of pictures that no record has."""
        raw = read_prompts(self.part(name)[0], self._take, notes, keys=self.keys)
        # Some records may be text alone; where all are, the name of the key is another.
        first: list[RawPrompt] = []
        for each in raw:
            first.append(each)
            if not each.unpictured:
                break
        else:
            self.refuse_broken(name, notes)
            if first:
                why = f"none of {len(first)} records has it; {first[0].where}: "
                raise ConfigError(why + first[0].unpictured, key="image_key")
        for number, each in enumerate(chain(first, raw), 1):
            yield each
            if number % BATCH == 0:  # before the others are read and tokenised
                self.refuse_broken(name, notes)
        self.refuse_broken(name, notes)

    def _take(self, where: str, record: Mapping[str, Any], folder: Path) -> RawPrompt:
        answer, level = self.other_keys
        key = self.image_key
        found = raw_prompt(where, record, self.prompt_key, answer, level, pictured=key is not None)
        if self.other_columns:
            found = replace(found, columns=columns_of(record, self.other_columns))
        if key is None:
            return found
        value, why = value_or_why(record, key)
        return replace(found, pictures=sources_of(value, key, folder), unpictured=why)

    def refuse_broken(self, name: Part, notes: Notes) -> None:
        """Refuse a part with more broken records than are left out; ConfigError names the first."""
        skips = self.broken_records == "skip"
        bound = (DEFAULT_MAX_BROKEN if self.max_broken is None else self.max_broken) * skips
        broken, records = notes.counts["broken"], notes.counts["records"]
        if broken > bound:
            rule = f"at most {bound} are left out (max_broken)"
            rule = rule if skips else "broken_records is refuse"
            text = notes.listed(f"{broken} of {records} records are broken, and {rule}", "broken")
            raise ConfigError(text, key=name)

    def check(self) -> None:
        """Look for the files, and for a record in each that can be used; none of those that
        validate is one that is trained on, however it is spelt."""
        trained = {path.expanduser().resolve(): path for path in self.train}
        for path in self.validation:
            if (same := trained.get(path.expanduser().resolve())) is not None:
                raise ConfigError(f"{path} is {same}, which is trained on", key="validation")
        for key, paths in (("train", self.train), ("validation", self.validation)):
            for path in paths:
                check_file(path, key)
                try:
                    most = self.max_broken or DEFAULT_MAX_BROKEN
                    check_records(path, self._take, most=most, keys=self.keys)
                except ConfigError as error:
                    reason = error.reason + self._named_otherwise(error.reason)
                    raise ConfigError(reason, key=error.key or key) from error

    def first(self, path: Path, most: int | None = _FIRST) -> list[RawPrompt]:
        """The prompts that one of the files begins with, of so many records; None: of all."""
        return first_prompts(path, self._take, most=most, keys=self.keys)

    def _named_otherwise(self, reason: str) -> str:
        """By which keys another one is read, where records have none of the name that is sought."""
        lacking = [
            name
            for name in type(self).model_fields
            if name.endswith("_key") and f"has no key `{getattr(self, name)}`" in reason
        ]
        return f"\n  which key is read says {' or '.join(lacking)}" if lacking else ""


class FilesConfig(RecordFilesConfig):
    """Prompts in files, with the answers that rewards are given."""

    answer_key: str = "solutions"
    """Key of the reference answer: a text, a number, a list of such, or what the reward asks
    for. A text or number becomes a list of one. `a.b` is the key `b` in what `a` holds."""
    level_key: str | None = None
    """Key of a whole number that says how difficult the prompt is; null: none."""
    columns: tuple[str, ...] = ()
    """Further keys, as `data_source`, whose values reward functions find in `sample.columns`."""

    @property
    def other_columns(self) -> tuple[str, ...]:
        """Those of rewards."""
        return self.columns

    @property
    def other_keys(self) -> tuple[str, str | None]:
        """Of answer and level."""
        return self.answer_key, self.level_key


class ChatTemplateConfig(StrictModel):
    """How messages become one text."""

    only_with: ClassVar = {
        "chat_template": "apply_chat_template: true",
        "chat_template_kwargs": "apply_chat_template: true",
    }

    apply_chat_template: bool = False
    """Whether messages, or a text as what a user says, are written by a template."""
    chat_template: Path | None = None
    """File of the template, in Jinja; null: that of the tokenizer."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """What the template is told beside the messages, as `enable_thinking: false` of Qwen3."""

    def may_be_told(self, key: str, was: Any, value: Any) -> bool:
        """The date of a template that would write that of the day."""
        dated = key == f"chat_template_kwargs.{DATE}" and was is None
        return dated or super().may_be_told(key, was, value)

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        taken = sorted(self.chat_template_kwargs.keys() & _OWN_ARGUMENTS)
        if taken:
            why = f"names {taken[0]}, which is said here already"
            raise illegal("chat_template_kwargs", why, hint="leave it out")
        return self

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What a tokenizer is told beside the messages."""
        if self.chat_template is None:
            return dict(self.chat_template_kwargs)
        try:
            text = self.chat_template.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = f"{self.chat_template} cannot be read: {error}"
            raise ConfigError(why, key="chat_template") from error
        return {"chat_template": text, **self.chat_template_kwargs}

    def check(self) -> None:
        """Look for the template."""
        super().check()
        _ = self.template_arguments


class EncodingConfig(ChatTemplateConfig):
    """How prompts become tokens."""

    apply_chat_template: bool = False
    """Put the prompt, a text or messages, into the tokenizer's chat template, up to where the
    assistant begins; otherwise the prompt is a text and is taken as it is."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Tokens of the longest prompt."""
    long_prompts: LongPrompts = "skip"
    """Leave out longer prompts, keep their first tokens (of plain texts alone), or refuse the
    set."""

    @model_validator(mode="after")
    def _check_cut(self) -> Self:
        if self.apply_chat_template and self.long_prompts == "truncate":
            raise illegal(
                "long_prompts",
                "truncate cuts off what the chat template ends with, where the assistant begins",
                hint="nearest: skip",
            )
        return self


class TextSourceConfig(StrictModel):
    """Where prompts come from: files, or a generated task."""

    files: RecordFilesConfig | None = None
    """Prompts in files."""
    task: Annotated[PromptTask, Component(REGISTRY)] | None = None
    """A generated set instead of files."""

    @property
    def has_pictures(self) -> bool:
        """Whether prompts may have pictures."""
        if self.files is None:
            return self.task is not None and self.task.has_pictures
        return self.files.image_key is not None


class PromptDataConfig(TextSourceConfig, EncodingConfig):
    """Where prompts come from, files or a generated task, and in which order they are drawn."""

    only_with: ClassVar = {"seed": "shuffle: true"}

    files: FilesConfig | None = None
    """Prompts in files."""
    task: Annotated[PromptTask, Component(REGISTRY)] | None = None
    """A generated set instead of files; its held-out prompts are those of evaluation."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a random order."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_both(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("task") and data.get("files"):
            why = "takes the place of `files`, and has held-out prompts of its own"
            raise illegal("task", why, hint="write one of the two")
        return data

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.files is None and self.task is None:
            raise illegal(
                "files", "no prompts are named", hint="write `files` or `task`, for example "
                "task.type: sorting",
            )  # fmt: skip
        return self

    @property
    def validates(self) -> bool:
        """Whether there are prompts of which an evaluation can be made."""
        return self.files is None or bool(self.files.validation)

    def build(self, tokenizer: PromptTokenizer, reader: PictureReader | None = None) -> PromptSets:
        """All prompts, see :meth:`build_part`."""
        train = self.build_part("train", tokenizer, reader)
        validates = self.validates
        held_out = self.build_part("validation", tokenizer, reader) if validates else None
        return PromptSets(train, held_out)

    def build_part(
        self, part: Part, tokenizer: PromptTokenizer, reader: PictureReader | None = None
    ) -> PromptDataset:
        """Read or generate prompts, and tokenise them; ConfigError where nothing is left.

        Args:
            part: Which; there may be none that validate, see :attr:`validates`.
            tokenizer: Of the model.
            reader: Of its pictures, where prompts have some.
        """
        if self.task is not None:
            with in_section("task"):
                items = self.task.items("train" if part == "train" else "held_out")
            return self._of_items(items, tokenizer, reader)
        assert self.files is not None, "a section names files or a task"
        return self._of_files(self.files, part, tokenizer, reader)

    def build_targets(
        self, tokenizer: PromptTokenizer, reader: PictureReader | None = None
    ) -> PromptDataset:
        """The prompts of a generated task that are trained on, each with its target as the answer;
        tokenised as :meth:`build_part` does."""
        assert self.task is not None, "only a task has targets"
        with in_section("task"):
            items = self.task.items("train")
        return self._of_items(items, tokenizer, reader, targets=True)

    @property
    def for_evaluation(self) -> Self:
        """Without the files that only training reads: they may be gone."""
        if self.files is None:
            return self
        return self.model_copy(update={"files": self.files.model_copy(update={"train": ()})})

    def _of_items(
        self,
        items: Iterable[PromptItem],
        tokenizer: PromptTokenizer,
        reader: PictureReader | None,
        *,
        targets: bool = False,
    ) -> PromptDataset:
        raw = raw_items(items, targets=targets)
        notes = Notes(Counter(records=len(raw)))
        dataset = encode_prompts(raw, tokenizer=tokenizer, config=self, notes=notes, reader=reader)
        return _not_empty(dataset, "the task", "task")

    def _of_files(
        self,
        files: FilesConfig,
        name: Part,
        tokenizer: PromptTokenizer,
        reader: PictureReader | None,
    ) -> PromptDataset:
        paths, limit = files.part(name)
        notes = Notes()
        dataset = encode_prompts(
            records_of(files, name, notes),
            tokenizer=tokenizer,
            config=self,
            notes=notes,
            limit=limit,
            reader=reader and reader.limited(files.max_image_tokens),
        )
        with in_section("files"):
            files.refuse_broken(name, notes)
        return _not_empty(dataset, ", ".join(map(str, paths)), f"files.{name}")


def records_of(files: RecordFilesConfig, name: Part, notes: Notes) -> Iterator[RawPrompt]:
    """What :meth:`RecordFilesConfig.read` gives, as of the section `files`."""
    with in_section("files"):
        yield from files.read(name, notes)


def raw_items(items: Iterable[PromptItem], *, targets: bool = False) -> list[RawPrompt]:
    """Items of a task as prompts, with their answers or the targets that are learnt."""
    return [
        RawPrompt(
            where=f"item {number}",
            content=item.prompt,
            answer=[item.target if targets else item.answer],
            level=item.level,
            pictures=item.pictures or None,
        )
        for number, item in enumerate(items)
    ]


def _not_empty(dataset: PromptDataset, source: str, key: str) -> PromptDataset:
    if not len(dataset):
        raise ConfigError(f"no prompt is left of {source}: {dataset.report}", key=key)
    return dataset
