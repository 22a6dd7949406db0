"""Prompts of tasks as tokens."""

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.models.vla.instructions import InstructionTable, hashed_words, read_tokenizer


def _encode(text):
    return [1, *hashed_words(text, first=4, words=60000)]


def _table(*prompts, limit=9, side="left", encode=_encode):
    return InstructionTable(prompts, encode, limit=limit, padding=0, side=side)


def test_padding_stands_behind_the_first_token_or_at_the_end():
    left, right = (_table("open it", "close the drawer", side=side) for side in ("left", "right"))
    assert left.ids[0].tolist() == [1, 0, *_encode("open it")[1:]]
    assert left.mask.tolist() == [[True, False, True, True], [True] * 4]
    assert right.ids[0].tolist() == [*_encode("open it"), 0]
    assert right.mask[0].tolist() == [True, True, True, False]


def test_rows_have_the_prompt_of_their_task():
    table = _table("open it", "close it")
    ids, mask = table({"task_ids": torch.tensor([1, 0, 1])})
    assert torch.equal(ids, table.ids[[1, 0, 1]])
    assert mask.all()
    alone, _ = _table("open it")({"states": torch.zeros(2, 3)})
    assert alone.tolist() == [_encode("open it")] * 2


def test_each_text_is_tokenised_once():
    seen = []
    _table("a", "b", "a", encode=lambda text: seen.append(text) or _encode(text))
    assert seen == ["a", "b"]


@pytest.mark.parametrize(
    ("prompts", "limit", "message"),
    [
        ((), 9, "does not say in words"),
        (("open the drawer",), 3, r"has 4 tokens, .* at most 3; legal with it: 4"),
    ],
)
def test_what_cannot_be_told_is_refused(prompts, limit, message):
    with pytest.raises(ConfigError, match=message):
        _table(*prompts, limit=limit)


def test_tasks_that_read_the_same_are_refused():
    with pytest.raises(ConfigError, match="two tasks the same tokens"):
        _table("open", "close", encode=lambda text: [1, 2])


def test_a_tokenizer_is_read_from_its_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "open": 5}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).encode("open").ids == [1, 5]
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        read_tokenizer(tmp_path / "other")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        read_tokenizer(tmp_path)
