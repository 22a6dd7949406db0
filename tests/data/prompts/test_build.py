"""Reading prompt sets: what is kept, what is left out and named, and what is refused."""

import builtins
import json
import math
import re
from datetime import date

import numpy as np
import pytest

from rlinf.config.validate import validate
from rlinf.data.prompts.config import FilesConfig, PromptDataConfig
from rlinf.data.prompts.prompt_files import Notes
from rlinf.errors import ConfigError, MissingPackageError, install_command

from .conftest import sums


def build(tokenizer, paths, validation=(), *, files=None, **rest):
    section = {"train": [str(path) for path in paths],
               "validation": [str(path) for path in validation], **(files or {})}  # fmt: skip
    config = validate(PromptDataConfig, {"files": section, **rest}, "test")
    config.check()
    return config.build(tokenizer)


def texts(dataset):
    return [prompt.text for prompt in dataset]


def as_json_array(records):
    return json.dumps(records, indent=1).encode()


def as_lines_with_bom(records):
    return b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, records)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", sums(3)),
        ("lines.json", sums(3)),
        ("a.json", as_json_array(sums(3))),
        ("bom.jsonl", as_lines_with_bom(sums(3))),
        ("bom.json", b"\xef\xbb\xbf" + as_json_array(sums(3))),
        ("a.csv", b"prompt,solutions\n0+1=,1\n1+1=,2\n2+1=,3\n"),
    ],
)
def test_every_kind_of_file_gives_the_same_prompts(tokenizer, write, name, content):
    train = build(tokenizer, [write(name, content)]).train
    assert texts(train) == ["0+1=", "1+1=", "2+1="]
    assert [prompt.answer for prompt in train] == [["1"], ["2"], ["3"]]
    assert [prompt.prompt_id for prompt in train] == [0, 1, 2]
    assert train[1].tokens.tolist() == tokenizer.encode("1+1=")
    assert train[1].tokens.dtype == np.int64
    assert (train.report.records, train.report.prompts, train.report.broken) == (3, 3, 0)
    with pytest.raises(ValueError, match="read-only"):
        train[1].tokens[0] = 0


def test_parquet_with_messages_and_levels(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    question = {"role": "user", "content": "1+1="}
    table = pyarrow.Table.from_pylist(
        [{"prompt": [question], "solutions": ["2", "two"], "level": 3}]
    )
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    keys = {"level_key": "level"}
    (prompt,) = build(tokenizer, [path], files=keys, apply_chat_template=True).train
    assert prompt.text == "<user>1+1=<assistant>"
    assert (prompt.answer, prompt.level) == (["2", "two"], 3)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet is broken after record 0"):
        build(tokenizer, [path])


@pytest.mark.parametrize(
    ("answers", "days", "reason"),
    [
        ([2.0, math.nan], [1, 1], "`solutions` holds NaN"),
        ([[2.0], [math.nan, 3.0]], [1, 1], "`solutions` holds NaN"),
        (["2", "3"], [None, date(2020, 1, 1)], "`day` is nothing that JSON can say: .*date"),
    ],
)
def test_what_parquet_holds_and_json_does_not_is_a_broken_record(
    tokenizer, tmp_path, answers, days, reason
):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"prompt": ["1+1=", "2+1="], "solutions": answers, "day": days})
    parquet.write_table(table, tmp_path / "a.parquet")
    keys = {"columns": ["day"], "broken_records": "refuse"}
    with pytest.raises(ConfigError, match=f"(?s)1 of 2 records are broken.*record 2: {reason}"):
        build(tokenizer, [tmp_path / "a.parquet"], files=keys)


def test_a_column_of_parquet_that_nobody_reads_may_hold_anything(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    times = pyarrow.array([1, 2], pyarrow.timestamp("ns"))  # which Python cannot tell
    told = [{"truth": "1", "index": 3}] * 2
    table = pyarrow.table(
        {"prompt": ["1+1=", "2+1="], "a.b": ["2", "3"], "told": told, "day": times}
    )
    parquet.write_table(table, path)
    for key, answers in (("a.b", [["2"], ["3"]]), ("told.truth", [["1"], ["1"]])):
        train = build(tokenizer, [path], files={"answer_key": key}).train
        assert [prompt.answer for prompt in train] == answers
    with pytest.raises(ConfigError, match=r"a\.parquet (is broken after record 0|can be used)"):
        build(tokenizer, [path], files={"answer_key": "day"})
    parquet.write_table(table.drop_columns(["day"]), path)
    with pytest.raises(ConfigError, match=r"has no key `c`; known: a\.b, prompt, told"):
        build(tokenizer, [path], files={"answer_key": "c"})


def test_an_answer_inside_another_column_is_found_by_both_names(tokenizer, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    told = {"style": "rule", "ground_truth": "2"}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "1+1=", "reward_model": told}]), path)
    keys = {"answer_key": "reward_model.ground_truth"}
    (prompt,) = build(tokenizer, [path], files=keys).train
    assert prompt.answer == ["2"]
    with pytest.raises(ConfigError, match=r"has no key `ground_trth`; did you mean `ground_truth`"):
        build(tokenizer, [path], files={"answer_key": "reward_model.ground_trth"})


def test_parquet_without_its_package_names_the_extra(tokenizer, write, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    path = write("a.parquet", b"")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=re.escape(install_command("language"))):
        build(tokenizer, [path])


def test_chat_template_takes_texts_and_messages(tokenizer, write):
    talk = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    path = write(
        "a.jsonl", [{"prompt": "0+1=", "solutions": "1"}, {"prompt": talk, "solutions": 4}]
    )
    train = build(tokenizer, [path], apply_chat_template=True).train
    assert texts(train) == [
        "<user>0+1=<assistant>",
        "<system>add<user>1+1<assistant>2<eos><user>2+2<assistant>",
    ]
    assert train[0].tokens[0] == tokenizer.convert_tokens_to_ids("<user>")
    assert train[0].tokens[-1] == tokenizer.convert_tokens_to_ids("<assistant>")
    assert train[1].answer == [4]
    plain = build(tokenizer, [path]).train
    assert texts(plain) == ["0+1="]
    assert "messages need apply_chat_template: true" in plain.report.examples[0]


def test_further_columns_are_kept_for_rewards_and_further_fields_for_the_template(
    tokenizer, write, monkeypatch
):
    template = "{% for m in messages %}{{ m.get('name', 'no') }}:{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    talk = [{"role": "user", "content": "1+1", "name": "ann", "calls": None}]
    record = {"prompt": talk, "solutions": "2", "source": "gsm", "extra": {"split": 1, "no": None}}
    path = write("a.jsonl", [record, {**record, "source": None}])
    columns = {"columns": ["source", "extra.split"]}
    first, second = build(tokenizer, [path], files=columns, apply_chat_template=True).train
    assert first.text == "ann:1+1"
    assert dict(first.columns) == {"source": "gsm", "extra.split": 1}
    assert dict(second.columns) == {"source": None, "extra.split": 1}
    plain = build(tokenizer, [path], apply_chat_template=True).train
    assert plain[0].columns == {}
    found = build(tokenizer, [path], files=columns, apply_chat_template=True).train
    assert plain.sha256 != found.sha256
    with pytest.raises(ConfigError, match="has no key `sorce`; did you mean `source`"):
        build(tokenizer, [path], files={"columns": ["sorce"]}, apply_chat_template=True)


BROKEN = {
    b"": "no reason, a blank line is none",
    b"{": "no JSON",
    b'{"prompt": "1", "solutions": "1"': "no JSON, Expecting ',' delimiter at column 33",
    b'{"prompt": "1\xff", "solutions": "1"}': "not UTF-8 at byte 13",
    b"[1]": "an object is expected, not list",
    b"null": "an object is expected, not NoneType",
    b'{"Prompt": "1", "solutions": "1"}': "has no key `prompt`; did you mean `Prompt`?",
    b'{"prompt": "1"}': "has no key `solutions`",
    b'{"prompt": "", "solutions": "1"}': "`prompt` is empty",
    b'{"prompt": [], "solutions": "1"}': "`prompt` is empty",
    b'{"prompt": 5, "solutions": "1"}': "`prompt` is a text or a list of messages, not int",
    b'{"prompt": null, "solutions": "1"}': "`prompt` is null",
    b'{"prompt": [{"role": "user"}], "solutions": "1"}': "`prompt[0]` is no message",
    b'{"prompt": [{"role": "user", "content": [1]}], "solutions": "1"}': "are texts",
    b'{"prompt": "\\ud83d", "solutions": "1"}': "half a character at 0",
    b'{"prompt": "1", "solutions": []}': "`solutions` is empty",
    b'{"prompt": "1", "solutions": ["1", ""]}': "holds an empty answer",
    b'{"prompt": "1", "solutions": " \\n"}': "holds an empty answer",
    b'{"prompt": "1", "solutions": "a \\ud83d"}': "`solutions` holds half a character",
    b'{"prompt": "1", "solutions": ["a", "\\ud83d"]}': "`solutions` holds half a character",
    b'{"prompt": "1", "solutions": NaN}': "NaN is no JSON number",
    b'{"prompt": "\xc3\xa9", "solutions": "1"}': "the tokenizer does not know",
    b'{"prompt": "1", "solutions": ' + b"[" * 100_000 + b"}": "nested too deeply",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:40].decode("latin-1"))
def test_a_broken_record_costs_itself_and_is_named(tokenizer, write, line):
    good = [json.dumps(record).encode() for record in sums(2)]
    path = write("a.jsonl", b"\n".join([good[0], line, good[1]]))
    train = build(tokenizer, [path]).train
    assert texts(train) == ["0+1=", "1+1="]
    if line:
        (example,) = train.report.examples
        assert example.startswith(f"{path}:2: ")
        assert BROKEN[line] in example
        assert train.report.broken == 1
        with pytest.raises(ConfigError, match="broken_records is refuse"):
            build(tokenizer, [path], files={"broken_records": "refuse"})
    else:
        assert train.report.broken == 0


def test_half_a_character_beside_the_content_of_a_message_is_told(tokenizer, write, tmp_path):
    template = tmp_path / "names.jinja"
    template.write_text("{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}")
    talks = [[{"role": "user", "content": "1", "name": name}] for name in ("a", "\ud83d")]
    path = write("a.jsonl", [{"prompt": talk, "solutions": "1"} for talk in talks])
    train = build(
        tokenizer, [path], apply_chat_template=True, chat_template=str(template)
    ).train  # fmt: skip
    assert texts(train) == ["a:1"]
    assert "half a character" in train.report.examples[0]


def test_more_broken_records_than_allowed_are_refused_with_the_first_few(tokenizer, write):
    path = write("a.jsonl", sums(3) + [{"question": "1", "answer": "1"}] * 7)
    assert build(tokenizer, [path], files={"max_broken": 7}).train.report.broken == 7
    with pytest.raises(ConfigError) as error:
        build(tokenizer, [path], files={"max_broken": 6})
    message = str(error.value)
    assert message.startswith("files.train: 7 of 10 records are broken, and at most 6 are left out")
    assert [f"{path}:{line}: " in message for line in range(4, 11)] == [True] * 5 + [False] * 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'[{"prompt": 1}', "is broken as a whole: no JSON"),
        ("a.csv", b'prompt,solutions\n"1,2\n', "is broken as a whole: no CSV"),
        ("a.csv", b"prompt,solutions\n\xff,2\n", "is broken as a whole: not UTF-8 at byte 17"),
        ("a.jsonl", b"", r"files\.train: .*a\.jsonl has no record"),
        (
            "a.jsonl",
            b"\n{\n",
            r"train: none of the first 1 records of .* can be used:\n.*:2: no JSON",
        ),
    ],
)
def test_a_file_without_use_is_an_error(tokenizer, write, name, content, reason):
    with pytest.raises(ConfigError, match=reason):
        build(tokenizer, [write(name, content)])


def test_a_csv_field_may_be_long(tokenizer, write):
    path = write("a.csv", b"prompt,solutions\n" + b"1" * 150_000 + b",1\n")
    with pytest.raises(ConfigError, match="1 too long"):
        build(tokenizer, [path], max_prompt_length=4)


def test_csv_rows_of_another_width_are_broken(tokenizer, write):
    path = write("a.csv", b"prompt,solutions\n1,1\n2\n3,3,3\n")
    report = build(tokenizer, [path]).train.report
    assert (report.prompts, report.broken) == (1, 2)
    assert report.examples[0].startswith(f"{path}: record 2: has another number of columns")


def test_a_csv_key_stands_once_in_the_first_line(tokenizer, write):
    path = write("a.csv", b"prompt,solutions,prompt\n1,1,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv: the first line has the key 'prompt' more than"):
        build(tokenizer, [path])


def test_long_prompts_are_skipped_cut_or_refused(tokenizer, write):
    path = write("a.jsonl", sums(12))  # 10+1= and 11+1= have 5 tokens
    skipped = build(tokenizer, [path], max_prompt_length=4).train
    assert (len(skipped), skipped.report.long, skipped.report.truncated) == (10, 2, 0)
    assert skipped.report.examples[0] == f"{path}:11: 5 tokens, 4 are allowed"
    assert "2 too long" in str(skipped.report)
    cut = build(tokenizer, [path], max_prompt_length=4, long_prompts="truncate").train
    assert (len(cut), cut.report.long, cut.report.truncated) == (12, 2, 2)
    assert cut[11].tokens.tolist() == tokenizer.encode("11+1")
    with pytest.raises(ConfigError, match="2 prompts are longer than 4 tokens"):
        build(tokenizer, [path], max_prompt_length=4, long_prompts="refuse")
    with pytest.raises(ConfigError, match=r"no prompt is left of .*12 too long"):
        build(tokenizer, [path], max_prompt_length=3)


def test_what_a_chat_template_ends_with_is_not_cut_off(tokenizer, write):
    path = write("a.jsonl", sums(12))
    with pytest.raises(ConfigError, match=r"where the assistant begins; nearest: skip"):
        build(tokenizer, [path], apply_chat_template=True, long_prompts="truncate")


def test_limits_files_in_order_and_shared_prompts(tokenizer, write):
    first, second = write("a.jsonl", sums(4)), write("b.jsonl", sums(4, start=4))
    held = write("c.jsonl", sums(3, start=7))
    sets = build(tokenizer, [second, first], [held], files={"limit": 5, "validation_limit": 2})
    assert texts(sets.train) == ["4+1=", "5+1=", "6+1=", "7+1=", "0+1="]
    assert sets.train.report.beyond_limit == 3
    assert texts(sets.validation) == ["7+1=", "8+1="]
    assert sets.shared == 1


def test_what_is_far_behind_the_limit_is_not_read(tokenizer, write):
    content = "".join(f"{json.dumps(record)}\n" for record in sums(3000)).encode()
    path = write("a.jsonl", content + b"no JSON\n" * 200)
    with pytest.raises(ConfigError, match="200 of 3200 records are broken"):
        build(tokenizer, [path])
    whole = build(tokenizer, [path], files={"max_broken": 200}).train
    for limit, records in ((2, 1025), (1024, 1025), (1025, 2049)):
        first = build(tokenizer, [path], files={"limit": limit}).train
        assert texts(first) == texts(whole)[:limit]
        assert str(first.report) == (
            f"{limit} prompts of the first {records} records, {records - limit} beyond the limit"
        )


def test_a_key_of_pictures_may_first_be_far_behind_the_limit(write):
    def first(records):
        path = write("a.jsonl", "".join(f"{json.dumps(each)}\n" for each in records).encode())
        files = FilesConfig(train=(path,), image_key="image", limit=1)
        return next(files.read("train", Notes())).content

    none = sums(3)
    assert first([*none, {**none[0], "image": "a.png"}]) == "0+1="
    with pytest.raises(ConfigError, match=r"image_key: none of 3 records has it; .*has no key"):
        first(none)


def test_a_tokenizer_without_chat_template_is_an_error(tokenizer, write, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(
        ConfigError, match="apply_chat_template: the tokenizer has no chat template"
    ):
        build(tokenizer, [write("a.jsonl", sums(1))], apply_chat_template=True)


TEMPLATE = (
    "{% for each in messages %}[{{ each.content }}]{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking %}think:{% endif %}say:{% endif %}"
)


def test_a_template_of_ones_own_with_what_it_is_told(tokenizer, write, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    path = write("a.jsonl", sums(1))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    own = {"apply_chat_template": True, "chat_template": str(tmp_path / "chat.jinja")}
    (prompt,) = build(tokenizer, [path], **own).train
    assert prompt.text == "[0+1=]say:"
    told = {"chat_template_kwargs": {"enable_thinking": True}}
    (prompt,) = build(tokenizer, [path], **own, **told).train
    assert prompt.text == "[0+1=]think:say:"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    (prompt,) = build(tokenizer, [path], apply_chat_template=True, **told).train
    assert prompt.text == "[0+1=]think:say:"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"chat_template": "gone.jinja"}, r"chat_template: gone\.jinja cannot be read"),
        ({"chat_template_kwargs": {"tokenize": True}}, "names tokenize, which is said here"),
        (
            {"apply_chat_template": False, "chat_template_kwargs": {"a": 1}},
            "has no effect without apply_chat_template: true",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tokenizer, write, section, message):
    with pytest.raises(ConfigError, match=message):
        build(tokenizer, [write("a.jsonl", sums(1))], **{"apply_chat_template": True, **section})


DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}{% for m in messages %}{{ m.content }}{% endfor %}"
)
UNTOLD = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
OF_THE_SYSTEM = (
    "{% set today = strftime_now('%d') %}{% if messages[0].role != 'system' %}{{ today }}"
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_template_that_writes_the_date_of_the_day_is_refused(tokenizer, write, monkeypatch):
    def built(template, **told):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        path = write("a.jsonl", sums(1))
        return build(tokenizer, [path], apply_chat_template=True, chat_template_kwargs=told)

    named = r'chat_template_kwargs: .*tomorrow.*nearest: chat_template_kwargs: \{date_string: "26'
    with pytest.raises(ConfigError, match=named):
        built(DATED)
    assert built(DATED, date_string="3+4").train[0].text.startswith("3+4")
    with pytest.raises(ConfigError, match="nearest: chat_template with a copy of it"):
        built(UNTOLD)


def test_a_template_may_look_at_the_clock_and_write_nothing_of_it(tokenizer, write, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", OF_THE_SYSTEM)
    told = [{"role": "system", "content": "1+"}, {"role": "user", "content": "2="}]
    path = write("a.jsonl", [{"prompt": told, "solutions": "3"}])
    assert build(tokenizer, [path], apply_chat_template=True).train[0].text == "1+2="


def test_messages_that_the_template_refuses_are_broken(tokenizer, write, monkeypatch):
    template = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}1+1="
    monkeypatch.setattr(tokenizer, "chat_template", template)
    one = [{"role": "user", "content": "1"}]
    path = write(
        "a.jsonl", [{"prompt": one * 2, "solutions": "1"}, {"prompt": one, "solutions": "1"}]
    )
    train = build(tokenizer, [path], apply_chat_template=True).train
    assert len(train) == 1
    assert "the chat template refuses the messages: one message" in train.report.examples[0]


def test_messages_that_the_code_of_a_template_does_not_take_are_broken(tokenizer, write, tmp_path):
    template = tmp_path / "length.jinja"
    template.write_text("{% for m in messages %}{{ m.name | length }}{{ m.content }}{% endfor %}")
    talks = [[{"role": "user", "content": "1", "name": name}] for name in ("a", 5)]
    path = write("a.jsonl", [{"prompt": talk, "solutions": "1"} for talk in talks])
    train = build(
        tokenizer, [path], apply_chat_template=True, chat_template=str(template)
    ).train  # fmt: skip
    assert texts(train) == ["11"]
    assert "refuses the messages: TypeError: object of type 'int'" in train.report.examples[0]


def test_equal_contents_have_equal_hashes(tokenizer, write):
    records = sums(3)
    one = build(tokenizer, [write("a.jsonl", records)]).train
    same = build(tokenizer, [write("b.json", as_json_array(records))]).train
    records[2]["solutions"] = "4"
    other = build(tokenizer, [write("c.jsonl", records)]).train
    assert one.sha256 == same.sha256 != other.sha256
    assert build(tokenizer, [write("d.jsonl", records[::-1])]).train.sha256 != other.sha256


def test_a_task_gives_disjoint_sets(tokenizer):
    task = {"type": "sorting", "levels": [4, 5], "size": 64, "held_out": 32}
    config = validate(PromptDataConfig, {"task": task}, "test")
    config.check()
    sets = config.build(tokenizer)
    assert (len(sets.train), len(sets.validation), sets.shared) == (64, 32, 0)
    prompt = sets.train[0]
    assert prompt.answer == ["".join(sorted(prompt.text[:-1]))]
    assert prompt.level == len(prompt.text) - 1
    assert {p.level for p in sets.train} == {4, 5}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "no prompts are named"),
        ({"files": {"train": []}}, "files.train"),
        ({"files": {"train": ["a"]}, "task": {"type": "sorting"}}, "takes the place of `files`"),
        ({"files": {"train": ["a"], "validation": ["a"]}}, "is trained on"),
        ({"files": {"train": ["a"], "validation_limit": 3}}, "without validation"),
        ({"files": {"train": ["a"], "broken_records": "refuse", "max_broken": 3}}, "no effect"),
        ({"task": {"type": "sortin"}}, "did you mean `sorting`"),
        ({"task": {"type": "sorting", "max_prompt_length": 3}}, "max_prompt_length"),
        ({"task": {"type": "sorting"}, "max_prompt_length": 0}, "max_prompt_length"),
        ({"task": {"type": "sorting"}, "long_prompts": "skp"}, "long_prompts"),
    ],
)
def test_illegal_configs_say_why(data, reason):
    with pytest.raises(ConfigError, match=reason):
        validate(PromptDataConfig, data, "test")


def test_missing_files_are_found_without_reading(write):
    path = write("train.jsonl", sums(1))
    wrong = str(path).replace("train", "tran")
    config = validate(PromptDataConfig, {"files": {"train": [wrong]}}, "test")
    with pytest.raises(ConfigError, match=r"files\.train: there is no file .*`train\.jsonl`"):
        config.check()
    config = validate(PromptDataConfig, {"files": {"train": [wrong.replace("tran", "no")]}}, "test")
    with pytest.raises(ConfigError, match="is the path right") as refused:
        config.check()
    assert "train.jsonl" not in str(refused.value)
    text = path.rename(path.with_suffix(".txt"))
    config = validate(PromptDataConfig, {"files": {"train": [str(text)]}}, "test")
    with pytest.raises(ConfigError, match=r"train\.txt is of no known kind; one of \.json"):
        config.check()
