"""Builds the prompt sets of a run: from files or from a generated task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.data.prompts.dataset import PromptDataset, PromptSets
from rlinf.data.prompts.encode import PromptTokenizer, encode_prompts
from rlinf.data.prompts.fields import RawPrompt, RecordKeys, UnusableRecordError, raw_prompt
from rlinf.data.prompts.records import BrokenRecord, read_records
from rlinf.data.prompts.report import Notes
from rlinf.data.tasks.protocol import Task, TaskItem
from rlinf.errors import ConfigError, in_section

if TYPE_CHECKING:
    from rlinf.data.prompts.config import (
        EncodingConfig,
        FilesConfig,
        PromptDataConfig,
        RecordFilesConfig,
    )


def build_sets(config: PromptDataConfig, tokenizer: PromptTokenizer) -> PromptSets:
    """Both sets that a configuration describes.

    Raises:
        ConfigError: Nothing is left, or a record or prompt is refused.
    """
    if config.task is not None:
        return _from_task(config.task.build(), config, tokenizer)
    assert config.files is not None, "the config has files or a task"
    files = config.files
    train = _from_files(files, "train", config, tokenizer)
    validation = None
    if files.validation:
        validation = _from_files(files, "validation", config, tokenizer)
    return PromptSets(train, validation)


def items_dataset(
    items: Iterable[TaskItem], config: EncodingConfig, tokenizer: PromptTokenizer
) -> PromptDataset:
    """Items of a task as prompts.

    Raises:
        ConfigError: All of them are longer than allowed, or one is and that is refused.
    """
    raw = [
        RawPrompt(
            where=f"item {number}", content=item.prompt, answer=[item.answer], level=item.level
        )
        for number, item in enumerate(items)
    ]
    notes = Notes()
    notes.counts["records"] = len(raw)
    dataset = encode_prompts(raw, tokenizer=tokenizer, config=config, notes=notes)
    _refuse_empty(dataset, "the task", "task")
    return dataset


def _from_task(task: Task, config: PromptDataConfig, tokenizer: PromptTokenizer) -> PromptSets:
    with in_section("task"):
        train, held_out = task.items("train"), task.items("held_out")
    return PromptSets(
        items_dataset(train, config, tokenizer), items_dataset(held_out, config, tokenizer)
    )


def _from_files(
    files: FilesConfig, name: str, config: EncodingConfig, tokenizer: PromptTokenizer
) -> PromptDataset:
    paths = files.train if name == "train" else files.validation
    keys = RecordKeys(files.prompt_key, files.answer_key, files.level_key)
    notes = Notes()
    with in_section("files"):
        raw = read_raw_prompts(paths, keys, notes)
        refuse_broken(notes, files, name)
    dataset = encode_prompts(
        raw,
        tokenizer=tokenizer,
        config=config,
        notes=notes,
        limit=files.limit if name == "train" else files.validation_limit,
    )
    with in_section("files"):
        refuse_broken(notes, files, name)
    _refuse_empty(dataset, ", ".join(map(str, paths)), f"files.{name}")
    return dataset


def read_raw_prompts(paths: Sequence[Path], keys: RecordKeys, notes: Notes) -> list[RawPrompt]:
    """The prompts of files, in order; ``notes`` is told which records are broken.

    Raises:
        ConfigError: A file cannot be read at all.
    """
    found = []
    for path in paths:
        for record in read_records(path):
            notes.counts["records"] += 1
            if isinstance(record, BrokenRecord):
                notes.add("broken", record.where, record.reason)
                continue
            try:
                found.append(raw_prompt(record.where, record.value, keys))
            except UnusableRecordError as error:
                notes.add("broken", record.where, str(error))
    return found


def refuse_broken(notes: Notes, files: RecordFilesConfig, name: str) -> None:
    """Refuse a set with more broken records than are left out.

    Raises:
        ConfigError: Names the first.
    """
    broken = notes.counts["broken"]
    if broken <= files.bound:
        return
    rule = "broken_records is refuse"
    if files.broken_records == "skip":
        rule = f"at most {files.bound} are left out (max_broken)"
    raise ConfigError(
        f"{broken} of {notes.counts['records']} records are broken, and {rule}:\n  "
        + "\n  ".join(notes.examples),
        key=name,
    )


def _refuse_empty(dataset: PromptDataset, source: str, key: str) -> None:
    if not len(dataset):
        raise ConfigError(f"no prompt is left of {source}: {dataset.report}", key=key)
