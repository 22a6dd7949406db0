"""What a policy is told to do, as tokens: each text is tokenised once.

Either an environment has a table of texts, which is read when the policy is built, or it words
anew what is to be done, and shows the words among its observations.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf.envs.base import INSTRUCTION_KEY, instruction_text
from rlinf.envs.results import TASK_IDS
from rlinf.errors import ConfigError, MissingPackageError

Encode = Callable[[str], list[int]]
"""From a whole prompt to its tokens, special ones included."""
Write = Callable[[str], str]
"""From an instruction to its prompt."""
_EXAMPLE = "open it"
_MOST_KNOWN = 4096  # instructions


class InstructionTable(torch.nn.Module):
    """The prompts of all tasks of an environment, looked up by the task of a row; or of what
    ``instruction`` says in it.

    Args:
        prompts: Of each task; empty is refused where ``free`` is not given.
        encode: Tokenises one prompt.
        limit: Tokens that a prompt may have.
        beside: Tokens that stand beside each prompt, of the same limit.
        side: Where shorter prompts are filled up, by token 0; on the left, the first token (BOS)
            stays in front, as pictures are put behind it: ``BOS, padding…, text``.
        free: From an instruction to its prompt, where observations hold instructions, which no
            table has; rows are then as long as the limit allows, whatever else is in a batch.

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
        side: Literal["left", "right"] = "right",
        free: Write | None = None,
    ) -> None:
        super().__init__()
        self._encode, self._limit, self._beside = encode, limit, beside
        self._side, self._free = side, free
        self.vocabulary: int | None = None
        """How many tokens the model has, as :func:`refuse_unknown` says; None: as many as come."""
        self._marks: dict[int, int] = {}  # tokens that stand for something else, and how many
        self._known: dict[bytes, tuple[list[int], list[bool]]] = {}
        if free is not None:  # a row that stands for all
            prompts = [free(_EXAMPLE)]
        if not prompts:
            raise ConfigError(
                "the environment does not say in words what is to be done, which the model reads; "
                "nearest: options.instruction of the env type gymnasium",
                key="model.type",
            )
        tokens = {text: self._within(text) for text in dict.fromkeys(prompts)}
        if len({tuple(ids) for ids in tokens.values()}) < len(tokens):
            raise ConfigError(
                "the tokenizer gives two tasks the same tokens", key="model.tokenizer"
            )
        self._prompts = tuple(tokens)
        self._longest = max(map(len, tokens.values())) if free is None else limit - beside
        filled = [self._filled(tokens[text]) for text in prompts]
        rows, masks = [ids for ids, _ in filled], [mask for _, mask in filled]
        self.register_buffer("ids", torch.tensor(rows), persistent=False)
        self.register_buffer("mask", torch.tensor(masks), persistent=False)

    def forward(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] and mask [B, L] of observations, each [B, ...]; those of the only task
        where they have no ``task_ids``."""
        if self._free is not None:
            return self._read(observations[INSTRUCTION_KEY], self._free)
        tasks = observations.get(TASK_IDS)
        if tasks is not None:
            return self.ids[tasks], self.mask[tasks]
        rows = len(next(iter(observations.values())))
        return self.ids[:1].expand(rows, -1), self.mask[:1].expand(rows, -1)

    def _read(self, given: Tensor, write: Write) -> tuple[Tensor, Tensor]:
        """Tokens and mask of instructions, uint8 [B, 256]; ConfigError where one is too long."""
        found = []
        for row in given.cpu().numpy():
            key = row.tobytes()
            if key not in self._known:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = self._filled(self._within(write(instruction_text(row))))
            found.append(self._known[key])
        ids = torch.tensor([ids for ids, _ in found], device=self.ids.device)
        return ids, torch.tensor([mask for _, mask in found], device=self.ids.device)

    def tokens_of(self, instruction: str) -> tuple[int, int]:
        """How many tokens the prompt of an instruction has, and how many it may have; ConfigError
        where it has one of pictures, or one that the model lacks. Whoever asks may do so while
        another thread calls :meth:`forward`."""
        prompt = instruction if self._free is None else self._free(instruction)
        return len(self._encoded(prompt)) + self._beside, self._limit

    def _encoded(self, text: str) -> list[int]:
        ids = self._encode(text)
        if any(ids.count(token) != count for token, count in self._marks.items()):
            raise ConfigError(
                f"{text!r} has a token in whose place the model reads a picture or the state, and "
                "which no instruction can have"
            )
        if self.vocabulary is not None and max(ids, default=0) >= self.vocabulary:
            raise _unknown(max(ids), self.vocabulary, of=f" for {text!r}")
        return ids

    def _within(self, text: str) -> list[int]:
        """Tokens of a prompt; ConfigError where there are too many, or others than can be."""
        ids = self._encoded(text)
        needed = len(ids) + self._beside
        if needed > self._limit:
            state = f", {self._beside} of them of the state" if self._beside else ""
            raise ConfigError(
                f"the instruction {text!r} has {needed} tokens{state}, the model is given at "
                f"most {self._limit}; legal with it: {needed} or more",
                key="model.max_prompt_tokens",
            )
        return ids

    def _filled(self, ids: list[int]) -> tuple[list[int], list[bool]]:
        gap = self._longest - len(ids)
        head = {"left": 1, "right": len(ids)}[self._side]
        row = [*ids[:head], *[0] * gap, *ids[head:]]
        return row, [True] * head + [False] * gap + [True] * (len(ids) - head)


class PicturePrompts(InstructionTable):
    """Prompts in which pictures stand before the instruction: each is given with one token, which
    the limit counts, and has a token for each patch once the network is known, by :meth:`show`."""

    _counts: Tensor | None = None

    def show(self, patches: Sequence[int], *, picture: int, others: Sequence[int] = ()) -> None:
        """Let the picture token stand for the patches of each picture; ConfigError where the
        tokenizer does not know this token, or an instruction has it, or one of ``others`` that
        the model reads something in place of."""
        # Pictures stand before the instructions, and so in the same columns.
        of_pictures = self.ids[0] == picture
        counts = {token: (self.ids == token).sum(dim=1) for token in (picture, *others)}
        self._marks = {token: int(found.min()) for token, found in counts.items()}
        if self._marks[picture] != len(patches):
            raise ConfigError(
                f"the tokenizer does not know the token of pictures, {picture}",
                key="model.tokenizer",
            )
        for text in self._prompts:
            self._encoded(text)
        columns = torch.ones_like(self.ids[0])
        columns[of_pictures] = torch.tensor(patches)
        self._counts = columns
        self.ids, self.mask = self._shown(self.ids), self._shown(self.mask)

    def _shown(self, columns: Tensor) -> Tensor:
        """Columns [·, L], those of pictures once for each patch."""
        if self._counts is None:
            return columns
        return columns.repeat_interleave(self._counts.to(columns.device), dim=1)

    def _read(self, given: Tensor, write: Write) -> tuple[Tensor, Tensor]:
        ids, mask = super()._read(given, write)
        return self._shown(ids), self._shown(mask)


def refuse_unknown(prompts: torch.nn.Module, vocabulary: int) -> None:
    """Refuse, by a ConfigError, prompts in whose tables a token is none of the model's; their
    tables refuse it in instructions that they read later."""
    for table in prompts.modules():
        if isinstance(table, InstructionTable):
            table.vocabulary = vocabulary
    largest = max(int(each.max()) for each in prompts.buffers() if each.dtype == torch.int64)
    if largest >= vocabulary:
        raise _unknown(largest, vocabulary)


def _unknown(token: int, vocabulary: int, of: str = "") -> ConfigError:
    return ConfigError(
        f"the tokenizer gives token {token}{of}, the model has {vocabulary}; nearest: the "
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
