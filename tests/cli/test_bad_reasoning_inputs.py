"""Broken prompts, models and tokenizers in a whole ``rlinf train``: a message and exit code 2, or a
count of what was left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from rlinf.data.tokenizer import train_tokenizer

GOOD = [{"prompt": f"{n}+1=", "solutions": f"{n + 1}"} for n in range(8)]
VERL = [
    {
        "prompt": each["prompt"],
        "reward_model": {"style": "rule", "ground_truth": each["solutions"]},
        "extra_info": {"split": "train"},
    }
    for each in GOOD
]
"""As another library lays its records out."""
RECIPE = """
task: reasoning
runner: {total_steps: 1}
data: {files: {train: [prompts.jsonl]}, max_prompt_length: 8}
model: {path: model}
rollout: {prompts: 2, group_size: 2, sampling: {max_new_tokens: 2}}
reward: {processes: 1, functions: {answer: {type: exact_match, extract: everything}}}
algorithm: {type: grpo}
actor: {type: fsdp}
logger: {backends: []}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer(["0123456789+="], path)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, a model of its own and good prompts."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place: Path, records: list[Any]) -> None:
    """Records of JSON, lines of text, or bytes."""
    lines = []
    for record in records:
        if not isinstance(record, bytes):
            text = record if isinstance(record, str) else json.dumps(record)
            record = text.encode()  # noqa: PLW2901 - its bytes
        lines.append(record + b"\n")
    (place / "prompts.jsonl").write_bytes(b"".join(lines))


def train(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["train", "recipe.yaml", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def change(**values: Any) -> Callable[[Path], None]:
    """Change or drop weights of the model: a tensor replaces, None drops."""

    def apply(place: Path) -> None:
        file = place / "model" / "model.safetensors"
        weights = load_file(file)
        for name, value in values.items():
            key = name.replace("__", ".")
            if value is None:
                del weights[key]
            else:
                weights[key] = value
        save_file(weights, file, {"format": "pt"})

    return apply


def larger_tokenizer(place: Path) -> None:
    train_tokenizer(["0123456789+= abcdefghijklmnopqrstuvwxyz"], place / "model")


def settings(name: str, **values: Any) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        file = place / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def contents(name: str, data: bytes | None) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        file = place / "model" / name
        file.unlink() if data is None else file.write_bytes(data)

    return apply


NORM = "model__layers__0__input_layernorm__weight"
MODELS: list[tuple[str, Callable[[Path], None], list[str]]] = [
    (
        "missing weights",
        change(**{NORM: None}),
        ["model.path", "missing in the files", NORM.replace("__", ".")],
    ),
    ("extra weights", change(strange=torch.ones(2)), ["model.path", "unknown", "strange"]),
    (
        "weights of another shape",
        change(**{NORM: torch.ones(3)}),
        ["model.path", "of another shape", NORM.replace("__", ".")],
    ),
    (
        "broken weights",
        contents("model.safetensors", b"\0" * 40),
        ["model.path", "model.safetensors, which is cut or damaged"],
    ),
    ("no weights", contents("model.safetensors", None), ["model.path", "holds no weights"]),
    ("larger tokenizer", larger_tokenizer, ["model.path", "the tokenizer has", "embedding"]),
    (
        "an end token out of range",
        settings("generation_config.json", eos_token_id=999),
        ["model.path", "end token 999", "generation_config.json"],
    ),
    ("broken tokenizer", contents("tokenizer.json", b"{"), ["model.path", "tokenizer"]),
    ("broken configuration", contents("config.json", b"{"), ["model.path", "config"]),
    ("a configuration without keys", contents("config.json", b"[]"), ["model.path", "config"]),
    (
        "a size of another type",
        settings("config.json", hidden_size="64"),
        ["model.path", "Field 'hidden_size' expected int"],
    ),
    (
        "a context of another type",
        settings("config.json", max_position_embeddings="512"),
        ["model.path", "Field 'max_position_embeddings' expected int"],
    ),
    (
        "no heads",
        settings("config.json", num_attention_heads=0),
        ["model.path", "says num_attention_heads 0, expected at least 1"],
    ),
    (
        "a negative size",
        settings("config.json", hidden_size=-8),
        ["model.path", "says hidden_size -8, expected"],
    ),
    (
        "layers without end",
        settings("config.json", num_hidden_layers=2 * 10**9),
        ["model.path", "says num_hidden_layers 2000000000, for which its weights are too small"],
    ),
    (
        "a vocabulary of another model",
        settings("config.json", vocab_size=10**8),
        ["model.path", "says vocab_size 100000000, for which"],
    ),
    (
        "no vocabulary",
        settings("config.json", vocab_size=None),
        ["model.path", "configuration of the model cannot be read"],
    ),
    ("unknown architecture", settings("config.json", model_type="qwen99"), ["model.path"]),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("case", "damage", "parts"), MODELS, ids=[m[0] for m in MODELS])
def test_models(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    damage: Callable[[Path], None],
    parts: list[str],
) -> None:
    damage(place)
    code, _, error = train(capsys)
    assert code == 2, error
    assert not (place / "runs").exists()
    assert "Traceback" not in error
    flat = " ".join(error.split())
    assert [part for part in parts if part not in flat] == [], flat


# Records, further words of the command line, and what must be said: by an error, or while training.
PROMPTS: list[tuple[str, list[Any], list[str], int, list[str]]] = [
    (
        "broken lines",
        [*GOOD, "{", "[1]", "nothing"],
        [],
        0,
        ["8 prompts of 11 records, 3 broken", "prompts.jsonl:9: no JSON"],
    ),
    (
        "missing keys",
        [*GOOD, {"promt": "1", "solutions": "1"}, {"prompt": "1"}],
        [],
        0,
        ["8 prompts of 10 records, 2 broken", "did you mean `promt`?", "no key `solutions`"],
    ),
    ("wrong encoding", [*GOOD, b'{"prompt": "\xe9"}'], [], 0, ["1 broken", "not UTF-8 at byte 12"]),
    (
        "over-long prompts",
        [*GOOD, {"prompt": "1" * 9, "solutions": "1"}],
        [],
        0,
        ["8 prompts of 9 records, 1 too long", "9 tokens, 8 are allowed"],
    ),
    (
        "over-long prompts cut",
        [*GOOD, {"prompt": "1" * 9, "solutions": "1"}],
        ["data.long_prompts=truncate"],
        0,
        ["9 prompts of 9 records, 1 cut to length"],
    ),
    (
        "over-long prompts refused",
        [*GOOD, {"prompt": "1" * 9, "solutions": "1"}],
        ["data.long_prompts=refuse"],
        2,
        ["data.max_prompt_length", "1 prompts are longer than 8 tokens", "prompts.jsonl:9"],
    ),
    (
        "characters that the tokenizer does not know",
        [*GOOD, {"prompt": "what?", "solutions": "1"}],
        [],
        0,
        ["1 broken", "characters that the tokenizer does not know"],
    ),
    (
        "more broken lines than allowed",
        [*GOOD, "{", "{"],
        ["data.files.max_broken=1"],
        2,
        ["data.files.train", "2 of 10 records are broken", "at most 1 are left out"],
    ),
    (
        "the first broken line refused",
        [*GOOD, "{"],
        ["data.files.broken_records=refuse"],
        2,
        ["data.files.train", "broken_records is refuse"],
    ),
    (
        "other keys altogether",
        GOOD,
        ["data.files.prompt_key=question"],
        2,
        [
            "data.files",
            "none of the first 8 records",
            "has no key `question`",
            "which key is read says prompt_key",
        ],
    ),
    (
        "a mapping that holds the answer",
        VERL,
        ["data.files.answer_key=reward_model"],
        2,
        [
            "data.files.answer_key = 'reward_model' (command line): prompts.jsonl:1: no completion "
            "could be scored, reward.functions.answer: the answer is no text, number or list",
            "did you mean `reward_model.ground_truth`?; it holds reward_model.style, "
            "reward_model.ground_truth",
        ],
    ),
    (
        "a key in a mapping",
        VERL,
        [
            "data.files.answer_key=reward_model.ground_truth",
            "data.files.columns=[extra_info.split]",
        ],
        0,
        ["8 prompts of 8 records"],
    ),
    (
        "an answer that no function can use, before others",
        [{"prompt": "2+2=", "solutions": {"sum": 4}}, *GOOD],
        [],
        0,
        ["9 prompts of 9 records"],
    ),
    ("nothing", [], [], 2, ["data.files", "prompts.jsonl has no record"]),
    (
        "messages without a template",
        [{"prompt": [{"role": "user", "content": "1"}], "solutions": "1"}],
        [],
        2,
        ["no prompt is left", "messages need apply_chat_template"],
    ),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "records", "words", "code", "parts"), PROMPTS, ids=[p[0] for p in PROMPTS]
)
def test_prompts(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    records: list[Any],
    words: list[str],
    code: int,
    parts: list[str],
) -> None:
    write(place, records)
    found, shown, error = train(capsys, *words)
    assert found == code, error
    assert (place / "runs").exists() == (code == 0)
    assert "Traceback" not in error
    flat = " ".join((shown if code == 0 else error).split())
    assert [part for part in parts if part not in flat] == [], flat


@pytest.mark.parametrize("turned", [1, -1])
def test_a_set_is_refused_only_where_none_of_its_answers_can_be_scored(
    place: Path, capsys: pytest.CaptureFixture[str], turned: int
) -> None:
    of_no_use = [{"prompt": "2+2=", "solutions": {"sum": 4}}] * 24
    write(place, [*of_no_use, *GOOD][::turned])
    code, _, error = train(capsys, "--dry-run")
    warning = "prompts.jsonl: 24 of 32 answers cannot be scored, and nothing is learnt from"
    assert (code, " ".join(error.split()).count(warning)) == (0, turned == 1), error
    for records, words in ((of_no_use, []), ([*of_no_use, *GOOD], ["data.files.limit=24"])):
        write(place, records)
        code, _, error = train(capsys, "--dry-run", *words)
        assert code == 2
        assert "prompts.jsonl:1: no completion could be scored" in " ".join(error.split())


REWARDS = """
def polite(sample, *, word="1"):
    if sample.prompt[0] in word:
        return 1.0
    raise ValueError("not today")


def places(samples):
    assert all(set(sample.values) == {"answer"} for sample in samples)
    assert len({sample.prompt for sample in samples}) == 1
    return range(len(samples))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "options", "code", "parts"),
    [
        ("polit", {}, 2, ["function = 'mine.py:polit'", "did you mean `polite`?"]),
        (
            "polite",
            {"wrd": "1"},
            2,
            ["reward.functions.mine.function", "cannot be called as polite(…, wrd=…)"],
        ),
        (
            "polite",
            {"word": "x"},
            2,
            ["no completion of the step could be scored; the first: mine/exception", "not today"],
        ),
        (
            "polite",
            {"word": "0123"},
            0,
            ["warning:", "is not trained on: mine/exception: ValueError: not today"],
        ),
    ],
    ids=["no such function", "no such option", "fails always", "fails sometimes"],
)
def test_own_rewards(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: dict[str, str],
    code: int,
    parts: list[str],
) -> None:
    (place / "mine.py").write_text(REWARDS)
    section = json.dumps({"type": "function", "function": f"mine.py:{name}", "options": options})
    words = ["rollout.prompts=8", "reward.functions=null", f"reward.functions.mine={section}"]
    found, _, error = train(capsys, *words)
    assert (found, "Traceback" in error) == (code, False), error
    assert (place / "runs").exists() == ("word" in options)  # what was trained is kept
    flat = " ".join(error.split())
    assert [part for part in parts if part not in flat] == [], flat


@pytest.mark.timeout(120)
def test_a_function_that_compares_the_answers_of_a_prompt(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.py").write_text(REWARDS)
    section = json.dumps({"type": "group_function", "function": "mine.py:places", "weight": 2.0})
    words = ["logger.backends=[jsonl]", "rollout.group_size=4", "--run-dir", "run"]
    code, _, error = train(capsys, *words, f"reward.functions.places={section}")
    assert code == 0, error
    (line,) = (place / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/places"] == (0 + 1 + 2 + 3) / 4
    expected = 2 * metrics["reward/places"] + metrics["reward/answer"]
    assert metrics["rollout/rewards"] == pytest.approx(expected)
    assert metrics["rollout/valid"] == 1.0


@pytest.mark.timeout(120)
def test_an_evaluation_that_judges_no_answer_has_no_rate(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.py").write_text(REWARDS)
    (place / "held.jsonl").write_text(json.dumps({"prompt": "9+9=", "solutions": "18"}))
    section = json.dumps(
        {"type": "function", "function": "mine.py:polite", "options": {"word": "x"}}
    )
    words = ["reward.functions=null", f"reward.functions.mine={section}"]
    code, shown, error = train(capsys, *words, "data.files.validation=[held.jsonl]")
    assert code == 2, error
    assert "no completion of the evaluation could be scored; the first: mine/exception" in error
    assert "before training" not in shown
    assert not (place / "runs").exists()
