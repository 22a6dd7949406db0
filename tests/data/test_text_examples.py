"""Prompts with answers: what becomes of them as tokens, and what is refused."""

import json
import re

import numpy as np
import pytest

from rlinf.config.validate import validate
from rlinf.data.text_examples import TextExamplesConfig
from rlinf.data.tokenizer import train_tokenizer
from rlinf.errors import ConfigError

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=<>/ "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer([CHARACTERS], tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def write(tmp_path):
    def write(name, *records):
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return str(path)

    return write


def build(tokenizer, **section):
    config = validate(TextExamplesConfig, section, "test")
    config.check()
    return config.build(tokenizer)


def sums(n):
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(n)]


def test_an_answer_follows_its_prompt_and_ends_the_text(tokenizer, write):
    sets = build(tokenizer, files={"train": [write("a.jsonl", *sums(3))]})
    assert sets.validation is None
    first = sets.train.examples[0]
    assert tokenizer.decode(first.prompt) == "0+1="
    assert tokenizer.decode(first.target) == f"1{tokenizer.eos_token}"
    assert first.target.dtype == np.int64
    assert len(first.prompt) + len(first.target) == 6


def test_a_chat_template_writes_prompt_and_answer(tokenizer, write):
    """Together they are what the template makes of the whole conversation."""
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2"}]  # fmt: skip
    last = {"role": "assistant", "content": "4"}
    path = write("a.jsonl", {"prompt": talk, "answer": "4"})
    (one,) = build(tokenizer, files={"train": [path]}, apply_chat_template=True).train.examples
    whole = tokenizer.apply_chat_template([*talk, last], tokenize=False)
    assert tokenizer.decode(np.concatenate([one.prompt, one.target])) == whole
    assert tokenizer.decode(one.prompt).endswith("<assistant>")
    path = write("b.jsonl", {"messages": [*talk, last]})
    files = {"train": [path], "prompt_key": "messages", "answer_key": None}
    (other,) = build(tokenizer, files=files, apply_chat_template=True).train.examples
    np.testing.assert_array_equal(other.prompt, one.prompt)
    np.testing.assert_array_equal(other.target, one.target)


@pytest.mark.parametrize("listed", [True, False])
def test_an_answer_may_be_a_message(tokenizer, write, listed):
    """As of conversations in which it is the last one."""
    talk, last = [{"role": "user", "content": "1+1"}], {"role": "assistant", "content": "2"}
    files = {"train": [write("a.jsonl", {"messages": [*talk, last]})], "prompt_key": "messages",
             "answer_key": None}  # fmt: skip
    (wanted,) = build(tokenizer, files=files, apply_chat_template=True).train.examples
    for name, prompt in (("b.jsonl", talk), ("c.jsonl", "1+1")):
        record = {"prompt": prompt, "completion": [last] if listed else last}
        files = {"train": [write(name, record)], "answer_key": "completion"}
        (one,) = build(tokenizer, files=files, apply_chat_template=True).train.examples
        np.testing.assert_array_equal(one.prompt, wanted.prompt)
        np.testing.assert_array_equal(one.target, wanted.target)


SAID = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("completion", "templated", "why"),
    [
        ([SAID], False, "messages need apply_chat_template: true"),
        ([{**SAID, "role": "user"}], True, "`completion` is said by user, not by the assistant"),
        ([{"text": "2"}], True, "`completion` is no message with `role` and `content`"),
        ([SAID, SAID], True, "the answer is one message of the assistant, not 2; of a whole"),
        (["2", "3"], True, "the answer is a text, not list"),
    ],
)
def test_answers_that_are_no_single_message_of_the_assistant(
    tokenizer, write, completion, templated, why
):
    files = {"train": [write("a.jsonl", {"prompt": "1+1", "completion": completion})],
             "answer_key": "completion"}  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape(why)):
        build(tokenizer, files=files, apply_chat_template=templated)


def test_every_turn_of_the_assistant_may_be_learnt(tokenizer, write):
    """Each is what it would be as the last one, and nothing else is."""
    said = [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "0")]
    talk = [{"role": role, "content": content} for role, content in said]
    chat = {"prompt_key": "messages", "answer_key": None}

    def examples(name, turns, *conversations):
        path = write(name, *({"messages": each} for each in conversations))
        files = {"train": [path], **chat, "turns": turns}
        return build(tokenizer, files=files, apply_chat_template=True).train

    found = examples("all.jsonl", "all", talk, talk[:2])
    wanted = examples("last.jsonl", "last", talk[:2], talk[:4], talk[:2])
    assert len(found) == len(wanted) == 3
    for one, other in zip(found.examples, wanted.examples, strict=True):
        np.testing.assert_array_equal(one.prompt, other.prompt)
        np.testing.assert_array_equal(one.target, other.target)
    with pytest.raises(ConfigError, match="of their own key have one answer; nearest: last"):
        build(tokenizer, files={"train": [write("a.jsonl", *sums(2))], "turns": "all"})


def test_a_conversation_is_learnt_or_held_out_as_a_whole(tokenizer, write):
    """Its later turns hold what is said in its first ones."""
    talks = [
        {"messages": [{"role": role, "content": f"{n}+{k}"} for k in range(3) for role in
                      ("user", "assistant")]} for n in range(4)
    ]  # fmt: skip
    files = {"train": [write("a.jsonl", *talks)], "prompt_key": "messages", "answer_key": None,
             "turns": "all"}  # fmt: skip

    def said(examples):
        return [tokenizer.decode(each.target).removesuffix("<eos>") for each in examples.examples]

    held = build(tokenizer, files=files, apply_chat_template=True, held_out=1)
    assert said(held.train) == [f"{n}+{k}" for n in range(3) for k in range(3)]
    assert said(held.validation) == ["3+0", "3+1", "3+2"]
    first = build(tokenizer, files=files | {"limit": 2}, apply_chat_template=True)
    assert said(first.train) == [f"{n}+{k}" for n in range(2) for k in range(3)]
    # Four talks of three turns each were four, or twelve.
    for limit, held_out, otherwise in ((4, 0, True), (11, 0, True), (12, 0, False), (12, 1, True)):
        given = {"files": files | {"limit": limit}, "held_out": held_out}
        config = validate(TextExamplesConfig, given | {"apply_chat_template": True}, "test")
        assert config.counted_otherwise(config.build(tokenizer)) is otherwise
    with pytest.raises(ConfigError, match="4 of 4 records cannot be held out; nearest: 3"):
        build(tokenizer, files=files, apply_chat_template=True, held_out=4)


def test_calls_of_tools_are_learnt_with_the_message_that_makes_them(tokenizer, write, tmp_path):
    template = tmp_path / "calls.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "={{ call.function.name }}{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    def learnt(**asking):
        talk = [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "tool_calls": [call], **asking},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": "2"},
        ]
        path = write("a.jsonl", {"messages": talk})
        files = {
            "train": [path], "prompt_key": "messages", "answer_key": None, "turns": "all"
        }  # fmt: skip
        chat = {"apply_chat_template": True, "chat_template": str(template)}
        sets = build(tokenizer, files=files, **chat)
        return [tokenizer.decode(each.target) for each in sets.train.examples]

    assert learnt(content="so") == ["so=add<eos>", "2<eos>"]
    for silent in ({"content": None}, {"content": ""}, {}):
        assert learnt(**silent) == ["=add<eos>", "2<eos>"]


def test_calls_of_tools_in_parquet_have_their_own_arguments_alone(tokenizer, write, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    template = tmp_path / "calls.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% for name in call.function.arguments %}={{ name }}{% endfor %}{% endfor %}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    calls = [{"name": "weather", "arguments": {"city": "x"}},
             {"name": "add", "arguments": {"a": 2, "b": 2}}]  # fmt: skip
    rows = [
        {"messages": [{"role": "user", "content": "so"},
                      {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]}
        for call in calls
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (write("a.jsonl", *rows), str(tmp_path / "a.parquet")):
        files = {"train": [path], "prompt_key": "messages", "answer_key": None}
        sets = build(
            tokenizer, files=files, apply_chat_template=True, chat_template=str(template)
        )  # fmt: skip
        learnt = [tokenizer.decode(each.target) for each in sets.train.examples]
        assert learnt == ["=city<eos>", "=a=b<eos>"]


def test_a_template_that_ends_no_answer_is_told(tokenizer, write, caplog):
    path = write("a.jsonl", *sums(3))
    build(tokenizer, files={"train": [path]}, apply_chat_template=True)
    assert not caplog.records
    endless = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    file = path.replace("a.jsonl", "a.jinja")
    with open(file, "w") as template:
        template.write(endless)
    build(tokenizer, files={"train": [path]}, apply_chat_template=True, chat_template=file)
    assert "no answer of files.train has the end token of the tokenizer" in caplog.text


def test_validation_is_held_out_from_the_end_or_read_from_files(tokenizer, write):
    path = write("a.jsonl", *sums(5))
    held = build(tokenizer, files={"train": [path]}, held_out=2)
    assert (len(held.train), len(held.validation)) == (3, 2)
    assert tokenizer.decode(held.validation.examples[-1].prompt) == "4+1="
    own = build(tokenizer, files={"train": [path], "validation": [write("b.jsonl", *sums(1))]})
    assert (len(own.train), len(own.validation)) == (5, 1)
    with pytest.raises(ConfigError, match="nearest: 4"):
        build(tokenizer, files={"train": [path]}, held_out=5)


def test_what_was_read_is_said_of_both_parts(tokenizer, write):
    path = write("a.jsonl", *sums(5), {"prompt": "1", "reply": "2"})
    said = build(tokenizer, files={"train": [path]}, held_out=2).report
    assert said.startswith("training: 5 prompts of 6 records, 1 broken\n")
    assert f"{path}:6: has no key `answer`" in said
    assert said.endswith("\nvalidation: the last 2 of them")
    assert "validation" not in build(tokenizer, files={"train": [path]}).report


def test_what_validates_and_is_trained_on_is_said(tokenizer, write):
    """By its loss the weights that are left behind are chosen."""
    train, copy = (write(name, *sums(4)) for name in ("a.jsonl", "b.jsonl"))
    files = {"train": [train], "validation": [copy], "validation_limit": 3}
    assert build(tokenizer, files=files).report.endswith("; 3 of them are trained on, too")
    other = write("c.jsonl", {"prompt": "9+1=", "answer": "10"}, *sums(1))
    files = {"train": [train], "validation": [other]}
    assert build(tokenizer, files=files).report.endswith("; 1 of them are trained on, too")
    twice = write("d.jsonl", *sums(2), *sums(2))
    said = build(tokenizer, files={"train": [twice]}, held_out=2).report
    assert said.endswith("the last 2 of them; 2 of them are trained on, too")
    spelt = train.replace("a.jsonl", "../" + train.split("/")[-2] + "/a.jsonl")
    with pytest.raises(ConfigError, match=r"validation: .*is .*a\.jsonl, which is trained on"):
        build(tokenizer, files={"train": [train], "validation": [spelt]})


def test_what_is_far_behind_the_limit_is_not_read(tokenizer, write):
    path = write("a.jsonl", *sums(3000))
    whole = build(tokenizer, files={"train": [path]}).train
    for limit, records in ((2, 1025), (1025, 2049)):
        first = build(tokenizer, files={"train": [path], "limit": limit}).train
        wanted = [each.content for each in whole.examples[:limit]]
        assert [each.content for each in first.examples] == wanted
        assert first.report == f"{limit} prompts of the first {records} records"


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer, write):
    class Endless:
        chat_template, unk_token_id, eos_token_id = None, None, None

        def __call__(self, text, *, add_special_tokens):
            return tokenizer(text, add_special_tokens=add_special_tokens)

    with pytest.raises(ConfigError, match=r"no token that ends a text.*eos_token"):
        build(Endless(), files={"train": [write("a.jsonl", *sums(2))]})


def test_a_generated_task_brings_worked_targets_and_held_out_prompts(tmp_path):
    task = {"type": "arithmetic", "levels": [2], "size": 20, "held_out": 5}
    config = validate(TextExamplesConfig, {"task": task}, "test")
    tokenizer = train_tokenizer(config.texts(), tmp_path / "tokenizer")
    sets = config.build(tokenizer)
    assert (len(sets.train), len(sets.validation)) == (20, 5)
    written = tokenizer.decode(sets.train.examples[0].target)
    assert re.search(r"<answer>\d+</answer>", written)


def test_broken_and_long_records_are_named(tokenizer, write):
    records = [{"prompt": "1", "reply": "2"}, {"prompt": "1", "answer": ["1", "2"]},
               {"prompt": "1", "answer": "É"}, {"prompt": "1" * 9, "answer": "1"},
               {"prompt": [{"role": "user", "content": "1"}], "answer": "2"}, *sums(2)]  # fmt: skip
    path = write("a.jsonl", *records)
    train = build(tokenizer, files={"train": [path]}, max_length=8).train
    assert len(train) == 2
    for told in ("2 prompts of 7 records, 4 broken, 1 too long", "has no key `answer`",
                 "the answer is a text, not list", "does not know", "11 tokens, 8 are allowed",
                 "messages need apply_chat_template"):  # fmt: skip
        assert told in train.report
    with pytest.raises(ConfigError, match=r"^max_length: 1 examples(.*\n)*.*a\.jsonl:4: 11"):
        build(tokenizer, files={"train": [path]}, max_length=8, long_examples="refuse")
    with pytest.raises(ConfigError) as refused:  # of the other kind nothing is listed
        build(tokenizer, files={"train": [path]}, max_length=8, long_examples="refuse")
    assert "no key" not in str(refused.value)
    with pytest.raises(ConfigError, match="1 of 7 records are broken, and broken_records is ref"):
        build(tokenizer, files={"train": [path], "broken_records": "refuse"})
    with pytest.raises(ConfigError, match=r"^files\.train: no example is left"):
        build(tokenizer, files={"train": [path]}, max_length=2)


@pytest.mark.parametrize("chat", [True, False])
def test_half_a_character_in_an_answer_costs_its_record(tokenizer, write, chat):
    path = write("a.jsonl", {"prompt": "1", "answer": "2 \ud83d"}, *sums(2))
    train = build(tokenizer, files={"train": [path]}, apply_chat_template=chat).train
    assert len(train) == 2
    assert "a.jsonl:1: `answer` holds half a character" in train.report


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({}, "no examples are named"),
        ({"files": {"train": ["a.jsonl"]}, "task": {"type": "sorting"}}, "one of `files` and"),
        ({"task": {"type": "sorting"}, "held_out": 3}, "the task says what validates already"),
        ({"task": {"type": "arithmetic", "calls": "calculator"}}, "call calculator"),
        ({"files": {"train": ["a.jsonl"], "anser_key": "b"}}, "did you mean"),
    ],
)
def test_what_cannot_be_meant_is_refused(section, told):
    with pytest.raises(ConfigError, match=told):
        validate(TextExamplesConfig, section, "test")
