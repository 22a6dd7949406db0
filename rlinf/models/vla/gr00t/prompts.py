"""What GR00T is told, as tokens: a chat in which pictures stand before the instruction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.data.tokenizer import divided_as_qwen
from rlinf.errors import ConfigError
from rlinf.models.vla.instructions import Encode, encoding, read_tokenizer, require_tokens
from rlinf.models.vla.pi0.prompts import TINY_VOCABULARY, tiny_encoder

PICTURE = "<IMG_CONTEXT>"
TINY_PICTURE = TINY_VOCABULARY  # of presets, one more than words have
_FILES = ("vocab.json", "merges.txt", "added_tokens.json")


def prompt(text: str, pictures: int) -> str:
    """The chat, as Eagle's template has it, with one picture token for each picture."""
    shown = "".join(f"<image {place}><img>{PICTURE}</img>" for place in range(1, pictures + 1))
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def tiny_encode(text: str) -> list[int]:
    """Of presets."""
    encode, _ = tiny_encoder()
    first, *others = (encode(part) for part in text.split(PICTURE))
    return sum(([TINY_PICTURE, *part] for part in others), first)


def eagle_encode(path: Path) -> Encode:
    """Of Eagle's tokenizer, in a directory, as ``tokenizer.json`` or in the files of Qwen's."""
    tokenizer = eagle_tokenizer(path.expanduser())
    require_tokens(tokenizer, path, PICTURE)
    return encoding(tokenizer)


def eagle_tokenizer(path: Path) -> Any:
    """A ``tokenizers.Tokenizer``; ConfigError where there is none."""
    there = path.is_dir() and all((path / name).is_file() for name in _FILES)
    if not there or (path / "tokenizer.json").is_file():
        return read_tokenizer(path)
    from tokenizers import AddedToken
    from tokenizers.models import BPE

    vocabulary, merges, added = (path / name for name in _FILES)
    try:
        tokenizer = divided_as_qwen(BPE.from_file(str(vocabulary), str(merges)))
        more: dict[str, int] = json.loads(added.read_text())
    except Exception as error:  # tokenizers raises nothing narrower
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} holds no tokenizer: {why}", key="model.tokenizer") from error
    in_order = sorted(more, key=lambda name: more[name])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in in_order])
    wrong = [name for name in in_order if tokenizer.token_to_id(name) != more[name]]
    if wrong:
        raise ConfigError(
            f"the files {', '.join(_FILES)} in {path} do not belong together: {wrong[0]} would be "
            f"token {tokenizer.token_to_id(wrong[0])}, not {more[wrong[0]]}",
            key="model.tokenizer",
        )
    return tokenizer
