"""From texts and messages to tokens, with the tokenizer of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlinf.data.prompts.dataset import Prompt, PromptDataset
from rlinf.data.prompts.fields import RawPrompt, UnusableRecordError
from rlinf.data.prompts.report import Notes
from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.data.prompts.config import EncodingConfig

_BATCH = 1024
_REFUSED_SHOWN = 5


class PromptTokenizer(Protocol):
    """What is used of a tokenizer of ``transformers``."""

    chat_template: Any
    unk_token_id: Any
    eos_token_id: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        """Tokenise texts; the result has ``input_ids``."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """The text of a conversation."""
        ...


def encode_prompts(
    raw: Sequence[RawPrompt],
    *,
    tokenizer: PromptTokenizer,
    config: EncodingConfig,
    notes: Notes,
    limit: int | None = None,
) -> PromptDataset:
    """Tokenise prompts in order, until ``limit`` are kept.

    Args:
        raw: Prompts as they were read.
        tokenizer: Tokenizer of the model.
        config: Chat template and length.
        notes: Is told what is left out.
        limit: Prompts to keep at most.

    Raises:
        ConfigError: There is no chat template, or an over-long prompt is refused.
    """
    if config.apply_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template; write false, or add one to its folder",
            key="apply_chat_template",
        )
    fitted = list(islice(_fitted(raw, tokenizer, config, notes), limit))
    if len(fitted) == limit:
        last, *_ = fitted[-1]
        notes.counts["beyond_limit"] += len(raw) - last - 1
    if config.long_prompts == "refuse" and notes.counts["long"]:
        raise ConfigError(
            f"{notes.counts['long']} prompts are longer than {config.max_prompt_length} tokens, "
            f"and long_prompts is refuse:\n  " + "\n  ".join(notes.examples[:_REFUSED_SHOWN]),
            key="max_prompt_length",
        )
    prompts = tuple(
        Prompt(prompt_id=i, text=text, tokens=tokens, answer=raw[n].answer, level=raw[n].level)
        for i, (n, text, tokens) in enumerate(fitted)
    )
    return PromptDataset(prompts, notes.report(len(prompts)))


def _fitted(
    raw: Sequence[RawPrompt], tokenizer: PromptTokenizer, config: EncodingConfig, notes: Notes
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Number, text and tokens of every prompt that can be kept."""
    # Some tokenizers name a token for the unknown without ever using it so.
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id != tokenizer.eos_token_id else None
    for start in range(0, len(raw), _BATCH):
        texts = _texts(raw, range(start, min(start + _BATCH, len(raw))), tokenizer, config, notes)
        for number, text, tokens in _tokenised(texts, tokenizer, config):
            where = raw[number].where
            if unknown is not None and unknown in tokens:
                notes.add("broken", where, "has characters that the tokenizer does not know")
                continue
            fitted = _fit(tokens, where, config, notes)
            if fitted is not None:
                yield number, text, fitted


def _texts(
    raw: Sequence[RawPrompt],
    numbers: Iterable[int],
    tokenizer: PromptTokenizer,
    config: EncodingConfig,
    notes: Notes,
) -> list[tuple[int, str]]:
    found = []
    for number in numbers:
        try:
            found.append((number, _text(raw[number], tokenizer, config)))
        except UnusableRecordError as error:
            notes.add("broken", raw[number].where, str(error))
    return found


def _text(item: RawPrompt, tokenizer: PromptTokenizer, config: EncodingConfig) -> str:
    content = item.content
    if not config.apply_chat_template:
        if not isinstance(content, str):
            raise UnusableRecordError("messages need apply_chat_template: true")
        return content
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )
    except TemplateError as error:
        raise UnusableRecordError(f"the chat template refuses the messages: {error}") from error


def _tokenised(
    texts: Sequence[tuple[int, str]], tokenizer: PromptTokenizer, config: EncodingConfig
) -> list[tuple[int, str, np.ndarray]]:
    if not texts:
        return []
    # A template writes its special tokens itself; a plain text begins with those of the model.
    special = not config.apply_chat_template
    ids = tokenizer([text for _, text in texts], add_special_tokens=special)["input_ids"]
    return [
        (number, text, np.array(row, np.int64))
        for (number, text), row in zip(texts, ids, strict=True)
    ]


def _fit(tokens: np.ndarray, where: str, config: EncodingConfig, notes: Notes) -> np.ndarray | None:
    if not len(tokens):
        notes.add("broken", where, "has no token")
        return None
    if len(tokens) <= config.max_prompt_length:
        return tokens
    notes.add("long", where, f"{len(tokens)} tokens, {config.max_prompt_length} are allowed")
    if config.long_prompts != "truncate":
        return None
    notes.counts["truncated"] += 1
    return tokens[: config.max_prompt_length].copy()
