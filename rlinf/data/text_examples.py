"""Prompts with the answers that a language model is to give: what supervised training learns.

Imports no torch, so that a recipe is checked in an instant.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from rlinf.config.component import Component, illegal
from rlinf.data.pictures import PictureReader, Pictures
from rlinf.data.prompts.config import (
    ChatTemplateConfig,
    Part,
    RecordFilesConfig,
    TextSourceConfig,
    raw_items,
    records_of,
)
from rlinf.data.prompts.dataset import (
    PromptTokenizer,
    RecordBatches,
    conversation,
    require_template,
    unknown_token,
)
from rlinf.data.prompts.pictures import PicturedPrompt
from rlinf.data.prompts.prompt_files import (
    Message,
    Notes,
    RawPrompt,
    UnusableRecordError,
    message_of,
)
from rlinf.data.tasks import REGISTRY, PromptTask
from rlinf.errors import ConfigError, in_section

log = logging.getLogger(__name__)


class ExampleFilesConfig(RecordFilesConfig):
    """Prompts and answers in files."""

    answer_key: str | None = "answer"
    """Key of the answer: a text, or one message of the assistant, in a list or not; null: the
    prompt is a list of messages, the last of which, by the assistant, is the answer."""
    turns: Literal["last", "all"] = "last"
    """Which messages of the assistant are learnt: the last one, or all, each behind those before
    it as an example of its own."""

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.turns == "all" and (self.answer_key is not None or self.image_key is not None):
            why = "prompts with pictures" if self.answer_key is None else "answers of their own key"
            raise illegal("turns", f"{why} have one answer", hint="nearest: last")
        return self

    @property
    def other_keys(self) -> tuple[str, str | None]:
        """Of the answer: that of the prompt where it is the last message."""
        return self.answer_key or self.prompt_key, None


class TextExamplesConfig(TextSourceConfig, ChatTemplateConfig):
    """Where prompts and their answers come from, and how they become tokens."""

    files: ExampleFilesConfig | None = None
    """Prompts and answers in files."""
    task: Annotated[PromptTask, Component(REGISTRY)] | None = None
    """A generated set instead of files: its worked targets are learnt, and the loss on those of its
    held-out prompts is that of validation."""
    held_out: int = Field(default=0, ge=0)
    """So many records at the end of the training files are not trained on, but validate; 0:
    the files of validation do, or none."""
    apply_chat_template: bool = False
    """Put prompt and answer into the tokenizer's chat template; otherwise the prompt is a text, the
    answer follows it as it is, and the token that ends a text follows the answer."""
    max_length: int = Field(default=1024, ge=2)
    """Tokens of the longest prompt with its answer."""
    long_examples: Literal["skip", "refuse"] = "skip"
    """Leave out longer examples, or refuse the set. They are never cut: a cut answer would teach
    to end in the middle."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.files is None) == (self.task is None):
            why = "no examples are named" if self.files is None else "is named beside `task`"
            raise illegal("files", why, hint="write one of `files` and `task`")
        if self.held_out and (self.files is None or self.files.validation):
            other = "the task" if self.files is None else "files.validation"
            raise illegal("held_out", f"{other} says what validates already", hint="nearest: 0")
        if self.task is not None and self.task.called_tools:
            raise illegal(
                "task",
                f"its targets call {', '.join(self.task.called_tools)}, whose replies are not "
                "there to be read",
                hint="nearest: without `calls`; the warm start of a run with rollout.agent learns "
                "them",
            )
        return self

    @property
    def validates(self) -> bool:
        """Whether there are examples to validate on."""
        files = self.files
        return files is None or bool(self.held_out or files.validation)

    def counted_otherwise(self, sets: TextExampleSets) -> bool:
        """Whether these would be other ``sets`` if limits and ``held_out`` counted examples, as
        they did earlier, and not records, of which one may have several."""
        if self.files is None:
            return False
        limits = (self.files.limit, self.files.validation_limit)
        trained, validating = len(sets.train), len(sets.validation or ())
        read = (trained + validating, 0) if self.held_out else (trained, validating)
        cut = any(limit and found > limit for found, limit in zip(read, limits, strict=True))
        return cut or bool(self.held_out and validating != self.held_out)

    def texts(self) -> Iterator[str]:
        """Every text of a generated task (ConfigError if of files), to train a tokenizer on."""
        if self.task is None:
            raise ConfigError("a tokenizer is only trained on the texts of a generated task")
        for item in self.task.items("train"):
            yield from (item.prompt, item.target)

    def build(
        self, tokenizer: PromptTokenizer, reader: PictureReader | None = None
    ) -> TextExampleSets:
        """Read or generate the examples, and tokenise them; ConfigError where nothing is left.

        Args:
            tokenizer: Of the model.
            reader: Of its pictures, where prompts have some.
        """
        if self.task is not None:
            both = self.task.items("train"), self.task.items("held_out")
            raw = [raw_items(items, targets=True) for items in both]
            train, held_out = (
                self._encode(
                    each, tokenizer, Notes(Counter(records=len(each))), "task", reader=reader
                )
                for each in raw
            )
            return TextExampleSets(train, held_out)
        assert self.files is not None, "a section names files or a task"
        train = self._from_files(self.files, "train", tokenizer, reader)
        if self.files.validation:
            validation = self._from_files(self.files, "validation", tokenizer, reader)
            return TextExampleSets(train, validation)
        if not self.held_out:
            return TextExampleSets(train, None)
        records = sorted({each.record for each in train.examples})
        if self.held_out >= len(records):
            raise ConfigError(
                f"{self.held_out} of {len(records)} records cannot be held out; nearest: "
                f"{len(records) - 1}",
                key="held_out",
            )
        first = records[-self.held_out]  # a conversation is not cut: its turns hold each other
        kept = sum(each.record < first for each in train.examples)
        return TextExampleSets(
            TextExamples(train.examples[:kept], train.report),
            TextExamples(train.examples[kept:], f"the last {len(train) - kept} of them"),
        )

    def _from_files(
        self,
        files: ExampleFilesConfig,
        name: Part,
        tokenizer: PromptTokenizer,
        reader: PictureReader | None,
    ) -> TextExamples:
        notes = Notes()
        raw = records_of(files, name, notes)
        _, limit = files.part(name)
        reader = reader and reader.limited(files.max_image_tokens)
        encoded = self._encode(raw, tokenizer, notes, f"files.{name}", limit, reader=reader)
        with in_section("files"):
            files.refuse_broken(name, notes)
        return encoded

    # -- from texts to tokens -------------------------------------------------------------------

    def _encode(
        self,
        raw: Iterable[RawPrompt],
        tokenizer: PromptTokenizer,
        notes: Notes,
        source: str,
        limit: int | None = None,
        *,
        reader: PictureReader | None,
    ) -> TextExamples:
        if self.apply_chat_template:
            require_template(tokenizer, self)
        elif tokenizer.eos_token_id is None:
            raise ConfigError(
                "the tokenizer has no token that ends a text, which is to follow each answer; name "
                "one as eos_token in its tokenizer_config.json, or write true where it has a chat "
                "template",
                key="apply_chat_template",
            )
        batches, stopped, records = RecordBatches(raw), False, 0
        examples: list[TextExample] = []
        for batch in batches:
            start = batches.taken - len(batch)
            for each in list(self._tokenised(batch, start, tokenizer, reader, notes)):
                records += not examples or each.record != examples[-1].record
                if limit is not None and records > limit:
                    break
                examples.append(each)
            if limit is not None and records >= limit:
                stopped = batches.go_on()
                break
        long = notes.counts["long"]
        if self.long_examples == "refuse" and long:
            why = (
                f"{long} examples are longer than {self.max_length} tokens, and long_examples is "
                "refuse"
            )
            raise ConfigError(notes.listed(why, "long"), key="max_length")
        if not examples:
            raise ConfigError(f"no example is left: {notes.report(0)}", key=source)
        end = tokenizer.eos_token_id
        if end is not None and not any(end in each.target for each in examples):
            log.warning(
                "no answer of %s has the end token of the tokenizer, %d, as the chat template does "
                "not write it: a model that learns these goes on until it is cut off. Let the "
                "template end what the assistant says with it.", source, end,
            )  # fmt: skip
        with_pictures = batches.pictured(each.pictures for each in examples)
        report = notes.report(len(examples), with_pictures, stopped=stopped)
        return TextExamples(tuple(examples), str(report))

    def _tokenised(
        self,
        raw: Sequence[RawPrompt],
        first: int,
        tokenizer: PromptTokenizer,
        reader: PictureReader | None,
        notes: Notes,
    ) -> Iterator[TextExample]:
        texts: list[tuple[tuple[int, str], PicturedPrompt, str, str]] = []
        told = self.template_arguments
        turns = ((n, turn) for n, each in enumerate(raw, first) for turn in self._turns(each))
        for number, item in turns:
            try:
                seen, where = PicturedPrompt(item, reader), (number, item.where)
                texts.append((where, seen, *self._texts(seen.content, item, tokenizer, told)))
            except UnusableRecordError as error:
                notes.add("broken", item.where, error)
        if not texts:
            return
        wheres, pictured, prompts, answers = zip(*texts, strict=True)
        # A template writes its special tokens itself; a plain text begins with those of the model.
        special = not self.apply_chat_template
        prompt_ids = tokenizer(list(prompts), add_special_tokens=special)["input_ids"]
        answer_ids = tokenizer(list(answers), add_special_tokens=False)["input_ids"]
        unknown = unknown_token(tokenizer)
        end = [] if self.apply_chat_template else [tokenizer.eos_token_id]
        rows = zip(wheres, pictured, prompt_ids, answer_ids, strict=True)
        for (number, where), seen, prompt, target in rows:
            length = len(prompt) + len(target) + len(end)
            if not prompt or not target:
                notes.add("broken", where, "the prompt or the answer has no token")
            elif unknown is not None and (unknown in prompt or unknown in target):
                notes.add("broken", where, "has characters that the tokenizer does not know")
            elif length > self.max_length:
                notes.add("long", where, f"{length} tokens, {self.max_length} are allowed")
            else:
                try:
                    pictures = seen.placed(prompt)
                except UnusableRecordError as error:
                    notes.add("broken", where, error)
                    continue
                tokens = np.array(prompt, np.int64), np.array([*target, *end], np.int64)
                yield TextExample(*tokens, pictures, number)

    def _turns(self, item: RawPrompt) -> Iterator[RawPrompt]:
        """A conversation up to each message of the assistant that is learnt."""
        content = item.content
        ends = [
            place for place, message in enumerate(content if isinstance(content, tuple) else ())
            if place and message["role"] == "assistant"
        ]  # fmt: skip
        if self.files is None or self.files.turns == "last" or not ends:
            yield item
            return
        for end in ends:
            where = f"{item.where}, message {end + 1}"
            yield replace(item, where=where, content=content[: end + 1])

    def _texts(
        self,
        content: str | Sequence[Message],
        item: RawPrompt,
        tokenizer: PromptTokenizer,
        told: Mapping[str, Any],
    ) -> tuple[str, str]:
        """Text of the prompt, and what follows it."""
        answer, said = item.answer, None
        if self.files is not None and self.files.answer_key is None:
            if isinstance(content, str) or content[-1]["role"] != "assistant" or len(content) < 2:
                raise UnusableRecordError(
                    f"`{self.files.prompt_key}` is no conversation that ends with the assistant"
                )
            content, said = content[:-1], content[-1]  # with the calls of tools in it
            answer = said["content"]
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]  # as readers give a text
        if self.files is not None and isinstance(answer, Mapping):
            said = _said(answer, str(self.files.answer_key))
            answer = said["content"]
        if isinstance(answer, list) and any(isinstance(each, Mapping) for each in answer):
            raise UnusableRecordError(
                f"the answer is one message of the assistant, not {len(answer)}; of a whole "
                "conversation under prompt_key, answer_key: null learns the last one"
            )
        if not isinstance(answer, str):
            raise UnusableRecordError(f"the answer is a text, not {type(answer).__name__}")
        if self.apply_chat_template:
            prompt = conversation(tokenizer, content, told)
            said = {"role": "assistant", "content": answer} if said is None else said
            text = conversation(tokenizer, content, told, said=said)
            if not text.startswith(prompt):  # generation would not continue it like this
                raise UnusableRecordError(
                    "the chat template does not continue the prompt by the answer"
                )
            return prompt, text[len(prompt) :]
        if not isinstance(content, str) or said is not None:
            raise UnusableRecordError("messages need apply_chat_template: true")
        return content, answer


def _said(answer: Mapping[str, Any], key: str) -> Message:
    """An answer that is given as a message."""
    message = message_of(answer, key)
    if message["role"] != "assistant":
        raise UnusableRecordError(f"`{key}` is said by {message['role']}, not by the assistant")
    return message


class TextExample(NamedTuple):
    """[P] int64 tokens of a prompt, at least one, [L] of its answer, the end included, the
    pictures of the prompt, and which record it is of."""

    prompt: np.ndarray
    target: np.ndarray
    pictures: Pictures = ()
    record: int = 0

    @property
    def content(self) -> tuple[bytes, ...]:
        """Equal for equal examples alone: the tokens, and a hash of each picture."""
        digests = (picture.digest for picture in self.pictures)
        return (self.prompt.tobytes(), self.target.tobytes(), *digests)


@dataclass(frozen=True, eq=False)
class TextExamples:
    """Examples in their order, and what was left out on loading, in words."""

    examples: tuple[TextExample, ...]
    report: str

    def __len__(self) -> int:
        return len(self.examples)


class TextExampleSets(NamedTuple):
    """What is trained on, and what validates; None where nothing does."""

    train: TextExamples
    validation: TextExamples | None

    @property
    def shared(self) -> int:
        """Examples that validate and are also trained on: their loss shows no generality."""
        if self.validation is None:
            return 0
        known = {example.content for example in self.train.examples}
        return sum(example.content in known for example in self.validation.examples)

    @property
    def sha256(self) -> str:
        """SHA-256, in hex, of tokens and pictures of both."""
        digest = hashlib.sha256(b"rlinf-examples/1\n")
        for part in (
            self.train.examples,
            () if self.validation is None else self.validation.examples,
        ):
            digest.update(f"{len(part)}\n".encode())
            for piece in (piece for example in part for piece in example.content):
                digest.update(f"{len(piece)}:".encode() + piece)
        return digest.hexdigest()

    @property
    def report(self) -> str:
        """What both hold, what was left out on loading, and how many are in both."""
        if self.validation is None:
            return f"training: {self.train.report}"
        both = f"; {self.shared} of them are trained on, too" if self.shared else ""
        return f"training: {self.train.report}\nvalidation: {self.validation.report}{both}"
