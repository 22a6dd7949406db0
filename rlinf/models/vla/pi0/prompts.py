"""What π₀ and π₀.₅ are told, as tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.errors import ConfigError
from rlinf.models.vla.instructions import (
    Encode,
    InstructionTable,
    Write,
    encoding,
    hashed_words,
    read_tokenizer,
)

_FIRST = "<bos>"
_NUMBERS = 256  # of which a dimension of the state is one; what is below them all is told as -1
TINY_VOCABULARY = 512


def tiny_encoder() -> tuple[Encode, Encode]:
    """Of presets: numbers have tokens of their own, words those of their checksums."""
    first, words = _NUMBERS + 1, TINY_VOCABULARY - _NUMBERS - 1

    def encode(text: str) -> list[int]:
        return [
            1 + int(piece) if piece.isdigit() and int(piece) < _NUMBERS
            else hashed_words(piece, first=first, words=words)[0]
            for piece in re.findall(r"-1\b|\w+|[^\w\s]|\n", text)
        ]  # fmt: skip

    return encode, encode


def published_encoder(path: Path) -> tuple[Encode, Encode]:
    """Of PaliGemma's tokenizer: of the beginning of a prompt, with its first token, and of more."""
    tokenizer = read_tokenizer(path, _FIRST)
    first, more = tokenizer.token_to_id(_FIRST), encoding(tokenizer)
    return lambda text: [first, *more(text)], more


def _cleaned(text: str) -> str:
    return text.strip().replace("_", " ").replace("\n", " ")


def plain_prompt(text: str) -> str:
    """π₀'s: the instruction and a line end."""
    return f"{_cleaned(text)}\n"


def state_head(text: str) -> str:
    """The beginning of one of π₀.₅'s."""
    return f"Task: {_cleaned(text)}, State:"


class StatePrompts(nn.Module):
    """π₀.₅'s: ``Task: {instruction}, State: {numbers};\\nAction:``, looked up piece by piece.

    Pieces of different length leave gaps, which the mask covers: positions count only what is
    there, so that it reads as if it were written without them.

    Args:
        prompts: Beginnings by :func:`state_head`, of each task.
        free: See :class:`~rlinf.models.vla.instructions.InstructionTable`.
        encoder: See :func:`published_encoder`.
        limit: Tokens that a prompt may have.
        dim: D of the state.
        told: Dimensions that are told, with zeros behind those of the state; None: D.

    Raises:
        ConfigError: There is no room for the state, or it has more dimensions than are told.
    """

    numbers: Tensor
    number_mask: Tensor
    tail: Tensor

    def __init__(
        self,
        encoder: tuple[Encode, Encode],
        *,
        prompts: Sequence[str],
        limit: int,
        dim: int,
        told: int | None = None,
        free: Write | None = None,
    ) -> None:
        super().__init__()
        if told is not None and told < dim:
            raise ConfigError(
                f"is {told}, and the environment's states have {dim} dimensions; nearest: {dim}",
                key="model.told_state_dim",
            )
        begin, more = encoder
        dim, self._behind = told or dim, (told or dim) - dim
        tail, pieces = ";\nAction: ", [more(f" {number}") for number in range(-1, _NUMBERS)]
        longest = max(map(len, pieces))
        taken = len(more(tail)) + dim * longest
        if taken >= limit:
            raise ConfigError(
                f"a state of {dim} dimensions takes {taken} tokens of the {limit} that the model "
                f"is given; legal with it: {taken + 1} or more, or state_in_prompt: false",
                key="model.max_prompt_tokens",
            )
        self.heads = InstructionTable(prompts, begin, limit=limit, beside=taken, free=free)
        head = prompts[0] if free is None else state_head("open it")
        example = [*begin(head), *pieces[8], *pieces[0], *pieces[201], *more(tail)]
        if begin(f"{head} 7 -1 200{tail}") != example:
            raise ConfigError(
                "the tokenizer joins numbers to what is around them, PaliGemma's does not",
                key="model.tokenizer",
            )
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        there = [[place < len(piece) for place in range(longest)] for piece in pieces]
        self.register_buffer("numbers", torch.tensor(padded), persistent=False)
        self.register_buffer("number_mask", torch.tensor(there), persistent=False)
        self.register_buffer("tail", torch.tensor(more(tail)), persistent=False)

    def forward(self, observations: Mapping[str, Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask, [B, L], with states [B, D] normalised to [−1, 1]."""
        ids, mask = self.heads(observations)
        states = functional.pad(states, (0, self._behind))
        # openpi and lerobot, whose models these are, tell what is below −1 apart, as −1, and not
        # what is above 1; the first of the pieces is that −1.
        bins = ((states + 1.0) * (_NUMBERS / 2)).floor().clamp(-1, _NUMBERS - 1).long()
        places, tail = bins + 1, self.tail.expand(len(ids), -1)
        tokens = torch.cat([ids, self.numbers[places].flatten(1), tail], dim=1)
        there = [mask, self.number_mask[places].flatten(1), torch.ones_like(tail, dtype=torch.bool)]
        return tokens, torch.cat(there, dim=1)
