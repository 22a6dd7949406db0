"""Trained tokenizers: nothing is lost, and every program that loads them encodes alike."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.tasks import ArithmeticTask
from rlinf.data.tokenizer import check_round_trip, load_tokenizer, train_tokenizer
from rlinf.errors import ConfigError

TASK = ArithmeticTask(levels=(2, 3, 4, 5), size=100, held_out=20)
CHARACTERS = "0123456789+-()%= "
TEXTS = [item.prompt + item.target for item in TASK.items("train")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(TEXTS, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_one_token_per_character_and_tag(tokenizer):
    assert len(tokenizer) == 6 + len(set(CHARACTERS)) + 2
    ids = tokenizer.encode("1+1=2 <answer>2</answer>")
    assert len(ids) == len("1+1=2 ") + 3
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.padding_side == "left"


@given(st.text(st.sampled_from(CHARACTERS), max_size=20), st.booleans())
def test_what_is_encoded_is_decoded(tokenizer, text, tag):
    text += "<answer>" + text if tag else ""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, 0, *ids, 1], skip_special_tokens=True) == text


def test_held_out_texts_survive_too(tokenizer):
    check_round_trip(tokenizer, [item.prompt + item.target for item in TASK.items("held_out")])


def test_the_type_of_the_model_beside_it_changes_nothing(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    for model_type in ("qwen2", "llama"):
        folder = tmp_path / model_type
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        for other in (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)):
            for text in TEXTS:
                assert other.encode(text) == tokenizer.encode(text)
                assert other.decode(other.encode(text)) == text
            assert (other.pad_token_id, other.eos_token_id) == (0, 1)
            assert other.chat_template == tokenizer.chat_template


def test_chat_template(tokenizer):
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert text == "<user>1+1=<assistant>2<eos>"
    assert len(tokenizer.encode(text)) == 4 + 1 + 3
    asked = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<user>1+1=<assistant>"
    assert text.startswith(asked)


def test_unknown_characters_are_marked_and_found(tokenizer):
    assert tokenizer.unk_token_id in tokenizer.encode("1é2")
    with pytest.raises(ConfigError, match="back for the text '1é2'"):
        check_round_trip(tokenizer, ["1+1=", "1é2"])


def test_pieces_are_merged_up_to_the_size_but_digits_never(tmp_path):
    texts = [f"the sum of {i} and {i + 7} is {2 * i + 7}" for i in range(50)]
    small = train_tokenizer(texts, tmp_path / "small")
    large = train_tokenizer(texts, tmp_path / "large", vocab_size=len(small) + 6, whole=())
    assert len(large) == len(small) + 6
    assert len(large.encode(texts[0])) < len(small.encode(texts[0]))
    assert large.decode(large.encode(texts[3])) == texts[3]
    assert len(large.encode("1234")) == 4


def test_training_is_deterministic(tmp_path):
    for name in ("a", "b"):
        train_tokenizer(TEXTS if name == "a" else TEXTS[::-1], tmp_path / name)
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_what_cannot_be_done_says_why(tmp_path):
    with pytest.raises(ConfigError, match="there is no character"):
        train_tokenizer(["", "<answer>"], tmp_path / "a")
    with pytest.raises(
        ConfigError, match=r"vocab_size = 9 is less than 2 characters .*nearest: 10"
    ):
        train_tokenizer(["ab"], tmp_path / "a", vocab_size=9)
    train_tokenizer(["ab"], tmp_path / "a", vocab_size=10)
    with pytest.raises(ConfigError, match="there is no folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read"):
        load_tokenizer(tmp_path / "empty")


def test_a_tokenizer_that_says_all_is_read_without_what_generates(folder):
    code = (
        "import sys; from rlinf.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "sys.exit('transformers.generation.utils' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
