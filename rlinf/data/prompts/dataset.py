"""Prompts in memory: tokenised once, immutable, numbered and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlinf.data.pictures import PictureReader, Pictures, places_of
from rlinf.data.prompts.pictures import PicturedPrompt
from rlinf.data.prompts.prompt_files import (
    LoadingReport,
    Message,
    Notes,
    RawPrompt,
    UnusableRecordError,
)
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.data.prompts.config import ChatTemplateConfig, EncodingConfig

_MOMENTS = (datetime(2001, 2, 3, 4, 5, 6), datetime(2018, 11, 29, 17, 38, 49))
"""Two moments that no form of a date writes alike."""
DATE = "date_string"
"""By which templates are told a date, as those of Llama 3."""
BATCH = 1024
"""Records that are read, and texts that are tokenised, at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One prompt.

    Args:
        prompt_id: Its number in the data set, from 0.
        text: What was tokenised, chat template included.
        tokens: [P] int64, unpadded, read-only.
        answer: What the reward is given.
        level: Level of difficulty, or None.
        pictures: Those among the tokens.
        columns: What else the reward is given.
    """

    prompt_id: int
    text: str
    tokens: np.ndarray
    answer: Any
    level: int | None = None
    pictures: Pictures = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens.flags.writeable = False

    @property
    def content(self) -> tuple[str, ...]:
        """Equal for equal prompts alone: the text, and a hash of each picture."""
        return (self.text, *(picture.digest.hex() for picture in self.pictures))

    def rolled(self, number: int) -> Prompt:
        """A prompt of the same size: its tokens of text, moved round."""
        moved = np.ones(len(self.tokens), np.bool_)
        moved[places_of(self.pictures)] = False
        tokens = self.tokens.copy()
        tokens[moved] = np.roll(self.tokens[moved], number)
        return replace(self, tokens=tokens)


@dataclass(frozen=True, eq=False)
class PromptDataset:
    """Prompts in the order of their numbers, and what was left out on loading."""

    prompts: tuple[Prompt, ...]
    report: LoadingReport

    def __post_init__(self) -> None:
        if any(prompt.prompt_id != i for i, prompt in enumerate(self.prompts)):
            raise ValueError("the prompts of a data set are numbered from 0 in their order")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, prompt_id: int) -> Prompt:
        return self.prompts[prompt_id]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    @cached_property
    def sha256(self) -> str:
        """SHA-256, in hex, of texts, pictures, tokens, answers, levels and columns."""
        digest = hashlib.sha256(b"rlinf-prompts/1\n")
        for prompt in self.prompts:
            text, *seen = prompt.content
            content = [text, prompt.tokens.tolist(), prompt.answer, prompt.level, *seen]
            content += [dict(prompt.columns)] if prompt.columns else []
            line = json.dumps(content, sort_keys=True, separators=(",", ":"), default=repr)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()


@dataclass(frozen=True)
class PromptSets:
    """What a run trains on, and what it is evaluated on; None where nothing is configured."""

    train: PromptDataset
    validation: PromptDataset | None

    @property
    def shared(self) -> int:
        """Validation prompts that are also trained on: their scores show no generality."""
        known = {prompt.content for prompt in self.train}
        return sum(prompt.content in known for prompt in self.validation or ())


class RecordBatches:
    """Records of a set, as many at a time as are tokenised together: who has enough of them leaves
    the rest unread.

    Attributes:
        taken: Records so far.
    """

    def __init__(self, raw: Iterable[RawPrompt]) -> None:
        self._raw, self._sought, self.taken = iter(raw), False, 0

    def __iter__(self) -> Iterator[list[RawPrompt]]:
        while batch := list(islice(self._raw, BATCH)):
            self.taken += len(batch)
            self._sought |= any(each.pictures is not None for each in batch)
            yield batch

    def go_on(self) -> bool:
        """Whether there is another record, which is taken."""
        found = next(self._raw, None) is not None
        self.taken += found
        return found

    def pictured(self, kept: Iterable[Pictures]) -> int | None:
        """How many prompts that are kept have pictures; None where no record is to have any."""
        return sum(map(bool, kept)) if self._sought else None


# -- from texts and messages to tokens ----------------------------------------------------------


class PromptTokenizer(Protocol):
    """What is used of a tokenizer of ``transformers``."""

    chat_template: Any
    unk_token_id: Any
    eos_token_id: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        """Tokenise texts; the result has ``input_ids``."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **more: Any
    ) -> Any:
        """The text of a conversation."""
        ...


def require_template(tokenizer: PromptTokenizer, config: ChatTemplateConfig) -> None:
    """ConfigError where neither the tokenizer nor the section has a chat template."""
    if not tokenizer.chat_template and config.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; write false, or name one in chat_template",
            key="apply_chat_template",
        )


def unknown_token(tokenizer: PromptTokenizer) -> int | None:
    """What the tokenizer gives for characters that it does not know; None: it knows all."""
    # Some tokenizers name a token for the unknown without ever using it so.
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown == tokenizer.eos_token_id else unknown


def conversation(
    tokenizer: PromptTokenizer,
    content: str | Sequence[Message],
    told: Mapping[str, Any],
    *,
    said: Message | None = None,
) -> str:
    """The text of messages, or of what a user says, in the chat template.

    It ends where the assistant begins, or with the message that it ``said``; what is ``told`` is
    that of :attr:`ChatTemplateConfig.template_arguments`. UnusableRecordError where the template
    refuses the messages, ConfigError where it writes the date of the day into the text.
    """
    from jinja2 import TemplateError

    # What a template does to messages is code, such as the length of what is none.
    of_code = ArithmeticError, AttributeError, LookupError, TypeError, ValueError
    messages: list[Message] = (
        [{"role": "user", "content": content}] if isinstance(content, str) else [*content]
    )
    if said is not None:
        messages.append(said)
    looked: list[str] = []  # at the clock, in which forms

    def written(moment: datetime) -> str:
        def now(form: str) -> str:
            looked.append(form)
            return moment.strftime(form)

        own = {**told, "strftime_now": now}  # which stands before that of transformers
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=said is None, **own
            )
        )

    try:
        text = written(_MOMENTS[0])
        if looked and written(_MOMENTS[1]) != text:
            raise _of_the_day(told.get("chat_template") or tokenizer.chat_template)
    except (TemplateError, *of_code) as error:
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise UnusableRecordError(f"the chat template refuses the messages: {why}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:  # in what a message has beside its content
        raise UnusableRecordError("the messages hold half a character") from error
    return text


def _of_the_day(template: Any) -> ConfigError:
    nearest = "chat_template with a copy of it that has a fixed one"
    if DATE in str(template):
        nearest = f'chat_template_kwargs: {{{DATE}: "26 Jul 2024"}}, or any other day'
    return ConfigError(
        "the chat template writes the date of the day, so that prompts would be others tomorrow, "
        f"when a run is resumed or compared; nearest: {nearest}",
        key="chat_template_kwargs",
    )


def encode_prompts(
    raw: Iterable[RawPrompt],
    *,
    tokenizer: PromptTokenizer,
    config: EncodingConfig,
    notes: Notes,
    limit: int | None = None,
    reader: PictureReader | None = None,
) -> PromptDataset:
    """Tokenise prompts in order, until ``limit`` are kept, and take no more of them; ``notes`` is
    told what is left out, and ``reader`` looks at the pictures."""
    if config.apply_chat_template:
        require_template(tokenizer, config)
    batches = RecordBatches(raw)
    fitted = list(islice(_fitted(batches, tokenizer, config, notes, reader), limit))
    stopped = len(fitted) == limit and batches.go_on()
    if len(fitted) == limit:
        notes.counts["beyond_limit"] += batches.taken - fitted[-1][0] - 1
    if config.long_prompts == "refuse" and notes.counts["long"]:
        why = (
            f"{notes.counts['long']} prompts are longer than {config.max_prompt_length} tokens, "
            "and long_prompts is refuse"
        )
        raise ConfigError(notes.listed(why, "long"), key="max_prompt_length")
    with_pictures = batches.pictured(each.pictures for _, each in fitted)
    report = notes.report(len(fitted), with_pictures, stopped=stopped)
    return PromptDataset(tuple(each for _, each in fitted), report)


def _fitted(
    batches: RecordBatches,
    tokenizer: PromptTokenizer,
    config: EncodingConfig,
    notes: Notes,
    reader: PictureReader | None,
) -> Iterator[tuple[int, Prompt]]:
    """Every prompt that can be kept, with its place among all records."""
    unknown, most, kept = unknown_token(tokenizer), config.max_prompt_length, count()
    told = config.template_arguments if config.apply_chat_template else None
    for batch in batches:
        start = batches.taken - len(batch)
        texts: dict[int, str] = {}
        pictured: dict[int, PicturedPrompt] = {}
        for number, item in enumerate(batch, start):
            try:
                pictured[number] = PicturedPrompt(item, reader)
                texts[number] = _text(pictured[number].content, tokenizer, told)
            except UnusableRecordError as error:
                notes.add("broken", item.where, error)
        if not texts:
            continue
        # A template writes its special tokens itself; a plain text begins with those of the model.
        special = not config.apply_chat_template
        ids = tokenizer(list(texts.values()), add_special_tokens=special)["input_ids"]
        for (number, text), tokens in zip(texts.items(), ids, strict=True):
            item = batch[number - start]
            where = item.where
            if unknown is not None and unknown in tokens:
                notes.add("broken", where, "has characters that the tokenizer does not know")
                continue
            if not len(tokens):
                notes.add("broken", where, "has no token")
                continue
            if len(tokens) > most:
                notes.add("long", where, f"{len(tokens)} tokens, {most} are allowed")
                if config.long_prompts != "truncate":
                    continue
                notes.counts["truncated"] += 1
            try:
                pictures = pictured[number].placed(tokens)
            except UnusableRecordError as error:
                notes.add("broken", where, error)
                continue
            found = Prompt(
                prompt_id=next(kept),
                text=text,
                tokens=np.array(tokens[:most], np.int64),
                answer=item.answer,
                level=item.level,
                pictures=pictures,
                columns=item.columns,
            )
            yield number, found


def _text(
    content: str | Sequence[Message], tokenizer: PromptTokenizer, told: Mapping[str, Any] | None
) -> str:
    if told is not None:
        return conversation(tokenizer, content, told)
    if not isinstance(content, str):
        raise UnusableRecordError("messages need apply_chat_template: true")
    return content
