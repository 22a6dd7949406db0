"""Published benchmarks in the forms in which their publishers distribute them."""

import csv

import pytest

from rlinf.config.validate import validate
from rlinf.data.prompts.benchmarks import BenchmarkConfig, arrange_choices
from rlinf.errors import ConfigError

AIME24 = [
    {"id": 60, "problem": "Find 1+1.", "solution": "It is 2.", "answer": "2",
     "url": "u", "year": "2024"},
    {"id": 61, "problem": "Find 2+2.", "solution": "It is 4.", "answer": "4",
     "url": "u", "year": "2024"},
]  # fmt: skip
AIME24_CAPITALS = [{"ID": "2024-I-1", "Problem": "Find 1+1.", "Solution": "s", "Answer": 2}]
AIME25 = [{"question": "Find 5*5.", "answer": "25"}]
MATH500 = [
    {"problem": "Is $\\frac{1}{2}$ half?", "solution": "s", "answer": "\\text{yes}",
     "subject": "Prealgebra", "level": 2, "unique_id": "test/prealgebra/1.json"},
]  # fmt: skip
GPQA = {
    "Record ID": "r1",
    "Question": "Which is even?",
    "Correct Answer": "two\n",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "three",
    "Incorrect Answer 3": "five, at least",
    "Subdomain": "numbers",
}


def load(tokenizer, path, form, **rest):
    data = {"format": form, "path": str(path), "apply_chat_template": False, **rest}
    config = validate(BenchmarkConfig, data, "test")
    config.check()
    return config.build(tokenizer)


@pytest.mark.parametrize(
    ("form", "records", "question", "answer", "level"),
    [
        ("aime24", AIME24, "Find 1+1.", ["2"], None),
        ("aime24", AIME24_CAPITALS, "Find 1+1.", [2], None),
        ("aime25", AIME25, "Find 5*5.", ["25"], None),
        ("math500", MATH500, "Is $\\frac{1}{2}$ half?", ["\\text{yes}"], 2),
    ],
)
def test_free_answers(tokenizer, write, form, records, question, answer, level):
    dataset = load(tokenizer, write("a.jsonl", records), form)
    assert len(dataset) == len(records)
    wanted = f"{question}\n\nReason step by step, and put your final answer within \\boxed{{}}."
    assert dataset[0].text == wanted
    assert (dataset[0].answer, dataset[0].level) == (answer, level)


@pytest.fixture
def gpqa(tmp_path):
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(GPQA))
        writer.writeheader()
        writer.writerow(GPQA)
        writer.writerow(GPQA | {"Question": "Which is even, again?"})
    return path


def test_multiple_choice(tokenizer, gpqa):
    dataset = load(tokenizer, gpqa, "gpqa_diamond")
    for prompt in dataset:
        ((letter,),) = (prompt.answer,)
        assert f"\n{letter}) two\n" in prompt.text
        assert sorted(line[3:] for line in prompt.text.splitlines() if line[1:3] == ") ") == [
            "five, at least", "one", "three", "two",
        ]  # fmt: skip
        assert prompt.text.startswith("Which is even")
        assert prompt.text.endswith("put the letter of the right choice within \\boxed{}.")


def test_choices_are_mixed_by_question_and_seed():
    choices = ["right", "a", "b", "c"]
    once = arrange_choices("q1", choices, seed=0)
    assert once == arrange_choices("q1", choices, seed=0)
    letters = [arrange_choices(f"q{i}", choices, seed=0)[1] for i in range(400)]
    assert {letter: letters.count(letter) > 70 for letter in "ABCD"} == dict.fromkeys("ABCD", True)
    assert len({arrange_choices("q1", choices, seed=seed)[0] for seed in range(20)}) > 5


def test_template_chat_and_limit(tokenizer, write):
    path = write("a.jsonl", AIME24)
    dataset = load(tokenizer, path, "aime24", apply_chat_template=True, template="Q: {question} A:",
                   limit=1)  # fmt: skip
    assert [prompt.text for prompt in dataset] == ["<user>Q: Find 1+1. A:<assistant>"]


def test_a_question_with_braces_is_put_as_it_is(tokenizer, write):
    path = write("a.jsonl", [{"problem": "What is {question} in {choices}?", "answer": "1"}])
    dataset = load(tokenizer, path, "aime24", template="{question}")
    assert dataset[0].text == "What is {question} in {choices}?"


def test_nothing_is_left_out_of_a_benchmark(tokenizer, write, gpqa):
    with pytest.raises(ConfigError, match=r"1 of 3 records .*aime24:\n.*:3: has none of the keys"):
        load(tokenizer, write("a.jsonl", [*AIME24, {"text": "x", "answer": "1"}]), "aime24")
    with pytest.raises(ConfigError, match="`Incorrect Answer 1` holds no choice"):
        load(tokenizer, write("b.jsonl", [{**GPQA, "Incorrect Answer 1": " "}]), "gpqa_diamond")
    records = [{"problem": "1" * n, "answer": "1"} for n in (2, 60)]
    with pytest.raises(ConfigError, match="1 prompts are longer than 60 tokens"):
        load(tokenizer, write("c.jsonl", records), "aime24", template="{question}?",
             max_prompt_length=60)  # fmt: skip
    with pytest.raises(ConfigError, match="has no question"):
        load(tokenizer, write("d.jsonl", b""), "aime24")
    with pytest.raises(ConfigError, match="has none of the keys problem"):
        load(tokenizer, gpqa, "math500")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"format": "aime24", "template": "no place"}, "lacks {question}"),
        ({"format": "gpqa_diamond", "template": "{question}"}, "lacks {choices}"),
        ({"format": "aime23"}, "format"),
    ],
)
def test_illegal_benchmarks_say_why(data, reason):
    with pytest.raises(ConfigError, match=reason):
        validate(BenchmarkConfig, {"path": "a.jsonl", **data}, "test")
