"""What a policy is told to do, as tokens: each text is tokenised once, when the policy is built."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError, MissingPackageError

Encode = Callable[[str], list[int]]
"""From a whole prompt to its tokens, special ones included."""


class InstructionTable(torch.nn.Module):
    """The prompts of all tasks of an environment, looked up by the task of a row.

    Args:
        prompts: Of each task; empty is refused.
        encode: Tokenises one prompt.
        limit: Tokens that a prompt may have.
        beside: Tokens that stand beside each prompt, of the same limit.
        padding: Token that fills up shorter prompts.
        side: Where they are filled up; on the left, the first token (BOS) stays in front, as
            pictures are put behind it: ``BOS, padding…, text``.

    Raises:
        ConfigError: There is no prompt, one has more tokens than the limit, or two different ones
            are the same tokens.
    """

    ids: Tensor
    """[tasks, L] int64, L tokens of the longest prompt."""
    mask: Tensor
    """[tasks, L] bool, False at padding."""

    def __init__(
        self,
        prompts: Sequence[str],
        encode: Encode,
        *,
        limit: int,
        beside: int = 0,
        padding: int,
        side: Literal["left", "right"],
    ) -> None:
        super().__init__()
        if not prompts:
            raise ConfigError(
                "the environment does not say in words what is to be done, which the model reads; "
                "nearest: options.instruction of the env type gymnasium",
                key="model.type",
            )
        tokens = {text: encode(text) for text in dict.fromkeys(prompts)}
        for text, ids in tokens.items():
            needed = len(ids) + beside
            if needed > limit:
                state = f", {beside} of them of the state" if beside else ""
                raise ConfigError(
                    f"the instruction {text!r} has {needed} tokens{state}, the model is given at "
                    f"most {limit}; legal with it: {needed} or more",
                    key="model.max_prompt_tokens",
                )
        if len({tuple(ids) for ids in tokens.values()}) < len(tokens):
            raise ConfigError(
                "the tokenizer gives two tasks the same tokens", key="model.tokenizer"
            )
        longest = max(map(len, tokens.values()))
        rows, masks = [], []
        for text in prompts:
            ids = tokens[text]
            gap = longest - len(ids)
            head = {"left": 1, "right": len(ids)}[side]
            rows.append([*ids[:head], *[padding] * gap, *ids[head:]])
            masks.append([True] * head + [False] * gap + [True] * (len(ids) - head))
        self.register_buffer("ids", torch.tensor(rows), persistent=False)
        self.register_buffer("mask", torch.tensor(masks), persistent=False)

    def forward(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] and mask [B, L] of observations, each [B, ...]; those of the only task
        where they have no ``task_ids``."""
        tasks = observations.get(TASK_IDS)
        if tasks is not None:
            return self.ids[tasks], self.mask[tasks]
        rows = len(next(iter(observations.values())))
        return self.ids[:1].expand(rows, -1), self.mask[:1].expand(rows, -1)


class PicturePrompts(InstructionTable):
    """Prompts in which pictures stand before the instruction, with a token for each patch once the
    network is known, by :meth:`show`.

    Args:
        prompts: Of each task, with one picture token for each picture.
        encode: Tokenises one prompt.
        limit: Tokens that a prompt may have beside those of pictures.

    Raises:
        ConfigError: As of other prompts.
    """

    def __init__(self, prompts: Sequence[str], encode: Encode, *, limit: int) -> None:
        super().__init__(prompts, encode, limit=limit, padding=0, side="right")

    def show(self, patches: Sequence[int], *, picture: int) -> None:
        """Let the picture token stand for the patches of each picture; ConfigError where the
        tokenizer does not know this token."""
        # Pictures stand before the instructions, and so in the same columns.
        of_pictures = self.ids[0] == picture
        if int(of_pictures.sum()) != len(patches):
            raise ConfigError(
                f"the tokenizer does not know the token of pictures, {picture}",
                key="model.tokenizer",
            )
        counts = torch.ones_like(self.ids[0])
        counts[of_pictures] = torch.tensor(patches)
        self.ids = self.ids.repeat_interleave(counts, dim=1)
        self.mask = self.mask.repeat_interleave(counts, dim=1)


def refuse_unknown(prompts: torch.nn.Module, vocabulary: int) -> None:
    """Refuse, by a ConfigError, prompts in whose tables a token is none of the model's."""
    largest = max(int(each.max()) for each in prompts.buffers() if each.dtype == torch.int64)
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer gives token {largest}, the model has {vocabulary}; nearest: the "
            "tokenizer that it was trained with",
            key="model.tokenizer",
        )


def read_tokenizer(path: Path, *needed: str) -> Any:
    """A ``tokenizers.Tokenizer`` from ``tokenizer.json``, the file or in the directory.

    ConfigError where there is none, or it lacks a token that is needed; nothing is looked for
    elsewhere.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError("tokenizers", "language", "a tokenizer") from error
    file = path.expanduser()
    file = file if file.suffix == ".json" else file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"there is no {file.name} in {file.parent}; every fast tokenizer is saved with one",
            key="model.tokenizer",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file} is no tokenizer: {why}", key="model.tokenizer") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    require_tokens(tokenizer, path, *needed)
    return tokenizer


def require_tokens(tokenizer: Any, path: Path, *needed: str) -> None:
    """Refuse, by a ConfigError, the tokenizer of another model, which lacks a token."""
    for token in needed:
        if tokenizer.token_to_id(token) is None:
            raise ConfigError(
                f"the tokenizer {path} has no {token}, which that of the model has; nearest: the "
                "tokenizer that it was trained with",
                key="model.tokenizer",
            )


def encoding(tokenizer: Any, *, special: bool = False) -> Encode:
    """From a text to its tokens; if ``special``, with those that the tokenizer puts around it."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    return encode


def hashed_words(text: str, *, first: int, words: int) -> list[int]:
    """Tokens of the words, signs and line ends of a text, for models with random weights.

    A token is a function of its word alone, so that a model which learned some tasks reads others
    alike: a number in [first, first + words) by checksum. Different words may share one.
    """
    pieces = re.findall(r"\w+|[^\w\s]|\n", text)
    return [first + zlib.crc32(piece.encode()) % words for piece in pieces]
