"""Small tokenizers that are trained on a task's texts, and tokenizers of models in folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlinf.data.tasks import ANSWER_TAGS
from rlinf.errors import ConfigError, MissingPackageError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>")
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What is never merged with its neighbours, as in the tokenizer of Qwen2."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Each message behind the token of its role; the assistant's end in the end token."""


def train_tokenizer(
    texts: Iterable[str],
    folder: Path | str,
    *,
    vocab_size: int | None = None,
    whole: Sequence[str] = ANSWER_TAGS,
) -> Any:
    """Train a tokenizer of characters and frequent pieces, and save it in a model's folder.

    The ids begin with those of pad, end, unknown and the three roles; then come the characters and
    merged pieces (byte-pair encoding, Sennrich et al. 2016), and the ``whole`` pieces last. Text is
    composed (NFC) and divided as that of Qwen2 is, so digits are never merged; a text of known
    characters is decoded as it was.

    Args:
        texts: All texts, or enough that every character occurs.
        folder: Is made; gets ``tokenizer.json``, ``tokenizer_config.json`` and the chat template.
        vocab_size: Tokens in all; None: one for each character, none merged.
        whole: Pieces of text that are one token each.

    Raises:
        ConfigError: There is no text, or ``vocab_size`` is less than the characters need.
    """
    try:
        from tokenizers import AddedToken, trainers
    except ImportError as error:
        raise _missing(error) from error
    texts = list(texts)
    special = [PAD, EOS, UNKNOWN, *ROLES]
    plain = [_without(text, [*whole, *special]) for text in texts]
    tokenizer = _untrained()
    characters = sorted({c for text in plain for c in _bytes_of(tokenizer, text)})
    if not characters:
        raise ConfigError("a tokenizer needs texts to be trained on; there is no character")
    needed = len(special) + len(characters) + len(whole)
    if vocab_size is not None and vocab_size < needed:
        raise ConfigError(
            f"vocab_size = {vocab_size} is less than {len(characters)} characters and "
            f"{len(special) + len(whole)} special and whole tokens need; nearest: {needed}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=(vocab_size or needed) - len(whole),
        special_tokens=special,
        initial_alphabet=characters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    _save(tokenizer, folder)
    loaded = load_tokenizer(folder)
    check_round_trip(loaded, texts)
    return loaded


def _save(tokenizer: Any, folder: Path | str) -> None:
    """As transformers reads it."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing(error) from error
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(str(folder))


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a model's folder, without looking anywhere else; ConfigError if none."""
    try:
        import transformers
    except ImportError as error:
        raise _missing(error) from error
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} with a tokenizer")
    # By the type of a model beside it, AutoTokenizer may build another class around the vocabulary,
    # and add that family's special tokens; it also imports all that generates, which takes seconds.
    loader = "PreTrainedTokenizerFast" if _says_all(folder) else "AutoTokenizer"
    try:
        return getattr(transformers, loader).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder} holds no tokenizer that can be read: {why}") from error


def check_round_trip(tokenizer: Any, texts: Iterable[str]) -> None:
    """ConfigError for the first text that encoding and decoding do not give back as it was."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text:
            raise ConfigError(f"the tokenizer gives {back!r} back for the text {text!r}")


def _untrained() -> Any:
    """A tokenizer without vocabulary, with the steps before and after as Qwen2 has them.

    Programs that take the class of a tokenizer from the type of its model rebuild these steps; a
    tokenizer with other ones would encode differently there.
    """
    from tokenizers import decoders, models

    tokenizer = divided_as_qwen(models.BPE(unk_token=UNKNOWN))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def divided_as_qwen(model: Any) -> Any:
    """A ``tokenizers.Tokenizer`` of a model of bytes, before which texts are composed (NFC) and
    divided as Qwen's are."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _bytes_of(tokenizer: Any, text: str) -> str:
    """The bytes of a text as the characters that stand for them in the vocabulary."""
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    return "".join(piece for piece, _ in pieces)


def _says_all(folder: Path) -> bool:
    """Whether the tokenizer's own file describes it in full."""
    if not (folder / "tokenizer.json").is_file():
        return False
    try:
        name = json.loads((folder / "tokenizer_config.json").read_bytes()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    return name in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _without(text: str, pieces: Iterable[str]) -> str:
    """The text that is left when whole pieces are taken out."""
    for piece in pieces:
        text = text.replace(piece, "")
    return text


def _missing(error: ImportError) -> MissingPackageError:
    package = (error.name or "transformers").partition(".")[0]
    return MissingPackageError(package, "language", "a tokenizer")
