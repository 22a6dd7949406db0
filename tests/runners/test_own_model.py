"""A model of the user's own: trained as it is, or refused with what to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from rlinf.config.load import load_recipe
from rlinf.config.validate import check
from rlinf.errors import ConfigError

from .reasoning_support import small_config, train, untimed, weights, write_recipe

OWN = (
    "model.architecture=null",
    "warm_start=null",
    "data.task=null",
    "validation.val_check_interval=0",
    "runner.total_steps=1",
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and prompts beside it, as another program may have left them."""
    directory = tmp_path_factory.mktemp("own")
    run = train(directory / "made", "runner.total_steps=1", "warm_start.steps=2")
    (run / "model").rename(directory / "model")
    lines = [json.dumps({"prompt": "312", "solutions": "123"}) for _ in range(8)]
    (directory / "prompts.jsonl").write_text("\n".join(lines))
    return directory


def _keys(own: Path) -> tuple[str, ...]:
    return (*OWN, f"model.path={own / 'model'}", f"data.files={{train: [{own / 'prompts.jsonl'}]}}")


def test_a_reward_function_reads_further_columns(own: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "312", "solutions": "123", "source": name, "weight": {"of": number}}
        for number, name in enumerate(["easy", "hard"] * 4)
    ]
    (tmp_path / "told.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "own.py").write_text(
        "def score(sample):\n"
        "    easy = sample.columns['source'] == 'easy'\n"
        "    return 10.0 * easy + sample.columns['weight.of']\n"
    )
    files = f"train: [{tmp_path / 'told.jsonl'}], columns: [source, weight.of]"
    function = f"{{type: function, function: '{tmp_path / 'own.py'}:score'}}"
    run = train(
        tmp_path, *OWN, f"model.path={own / 'model'}", f"data.files={{{files}}}",
        f"reward.functions={{mine: {function}}}", "rollout.prompts=8",
        "runner.completions_kept=8", "data.shuffle=false",
    )  # fmt: skip
    kept = [json.loads(line) for line in (run / "completions" / "1.jsonl").open()]
    wanted = [10.0 * (number % 2 == 0) + number for number in range(8)]
    size = len(kept) // 8
    assert [line["reward"] for line in kept[::size]] == wanted


def test_a_tokenizer_needs_no_padding_token(own: Path, tmp_path: Path) -> None:
    padded = train(tmp_path / "padded", *_keys(own))
    path = own / "model" / "tokenizer_config.json"
    given = path.read_text()
    settings = json.loads(given)
    assert settings.pop("pad_token") is not None
    path.write_text(json.dumps(settings))
    try:
        plain = train(tmp_path / "plain", *_keys(own))
        assert "pad_token" not in json.loads((plain / "model" / path.name).read_text())
    finally:
        path.write_text(given)
    assert untimed(plain)[-1]["actor/loss"] == untimed(padded)[-1]["actor/loss"]
    for name, value in weights(padded).items():
        assert (weights(plain)[name] == value).all(), name


def test_answers_beyond_the_context_are_refused_before_anything_starts(
    own: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, *_keys(own), "rollout.sampling.max_new_tokens=46")
    assert "rollout.sampling.max_new_tokens" in str(refused.value)
    assert "nearest: max_new_tokens: 45 or data.max_prompt_length: 2" in str(refused.value)
    with pytest.raises(ConfigError, match=r"validation\.sampling\.max_new_tokens"):
        train(tmp_path / "made", "validation.sampling={max_new_tokens: 46}")


def test_a_model_is_not_taken_for_a_tokenizer_alone(own: Path, tmp_path: Path) -> None:
    overrides = [f"model.path={own / 'model'}"]
    config = small_config(tmp_path, *overrides)
    with pytest.raises(ConfigError) as refused:
        check(config, load_recipe(str(write_recipe(tmp_path)), overrides))
    assert "model.architecture" in str(refused.value)
    assert "architecture: null" in str(refused.value)
