"""Language models: created by seed, loaded whole or not at all, merged with their adapters."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlinf.errors import ConfigError
from rlinf.models.language_config import ArchitectureConfig, LanguageModelConfig, LoraConfig

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf.models.adapters import adapter_file_name, is_adapter
from rlinf.models.language import (
    build_language_model,
    build_network,
    full_weights,
    load_tokenizer,
    save_language_model,
)


def adapter_weights(model):
    found = model.get_base_model().named_parameters()
    return [(adapter_file_name(name), value) for name, value in found if is_adapter(name)]


SMALL = ArchitectureConfig(
    hidden_size=16, layers=2, heads=4, kv_heads=2, intermediate_size=24, max_position_embeddings=64
)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of 20 characters and an end token."""
    path = tmp_path_factory.mktemp("tokenizer")
    words = {"<pad>": 0, "<end>": 1, **{text: 2 + i for i, text in enumerate("0123456789+-*/= ")}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(path)
    return path


@pytest.fixture
def saved(tokenizer_path: Path, tmp_path: Path) -> Path:
    """A directory with a model of random weights, not tied."""
    architecture = SMALL.model_copy(update={"tie_word_embeddings": False})
    config = LanguageModelConfig(path=tokenizer_path, architecture=architecture)
    model, tokenizer = build_language_model(config, seed=3)
    save_language_model(model, tmp_path / "model", tokenizer=tokenizer)
    return tmp_path / "model"


def _logits(model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(2, 14).view(2, 6)).logits
    return logits


def test_vision_that_a_model_does_not_have_cannot_be_frozen(saved: Path) -> None:
    for config in (LanguageModelConfig(path=saved, freeze_vision=True),
                   LanguageModelConfig(architecture=SMALL, freeze_vision=True)):  # fmt: skip
        with pytest.raises(ConfigError, match=r"^freeze_vision: the model reads text only; nea"):
            config.check()
    LanguageModelConfig(path=saved).check()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_seed_determines_the_weights(kind: str, tied: bool, tokenizer_path: Path) -> None:
    architecture = SMALL.model_copy(update={"type": kind, "tie_word_embeddings": tied})
    config = LanguageModelConfig(path=tokenizer_path, architecture=architecture)
    state = torch.random.get_rng_state()
    one, same, other = (build_network(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert one.config.model_type == kind
    assert torch.equal(_logits(one), _logits(same))
    assert not torch.allclose(_logits(one), _logits(other))
    assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    assert one.config.vocab_size == len(load_tokenizer(config))


@pytest.mark.parametrize("tied", [True, False])
def test_what_was_saved_is_loaded(tied: bool, tokenizer_path: Path, tmp_path: Path) -> None:
    architecture = SMALL.model_copy(update={"tie_word_embeddings": tied})
    model, tokenizer = build_language_model(
        LanguageModelConfig(path=tokenizer_path, architecture=architecture), seed=3
    )
    save_language_model(model, tmp_path, tokenizer=tokenizer)
    assert not list(tmp_path.glob("*.bin"))
    files = [tmp_path / name for name in ("model.safetensors", "config.json")]
    assert len({file.stat().st_mode for file in files}) == 1  # others may read the weights, too
    loaded = build_network(LanguageModelConfig(path=tmp_path))
    assert loaded.training
    assert torch.equal(_logits(model), _logits(loaded))
    half = build_network(LanguageModelConfig(path=tmp_path, dtype="bfloat16"))
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "missing in the files.*model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, "unknown to the model: model.extra.weight"),
        ({"model.norm.weight": torch.zeros(7)}, "another shape.*model.norm.weight"),
        (
            {"model.norm.weight": torch.full((SMALL.hidden_size,), torch.nan)},
            "numbers that are not finite, first in model.norm.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None],
    message: str,
    saved: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    weights = {**load_file(saved / "model.safetensors"), **change}
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        build_network(LanguageModelConfig(path=saved))
    assert not caplog.text  # no table of transformers: the error says it in one line


def test_an_output_layer_that_is_said_to_be_tied_and_is_another_is_refused(
    saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    settings = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    told = (
        r"tie_word_embeddings: true, that lm_head\.weight is model\.embed_tokens\.weight, and the "
        r"files .*; nearest: tie_word_embeddings: false in config\.json, or files without lm_head"
    )
    with pytest.raises(ConfigError, match=told) as caught:
        build_network(LanguageModelConfig(path=saved))
    assert caught.value.key == "path"
    assert not caplog.text  # nor does transformers say it
    weights = load_file(saved / "model.safetensors")
    same = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    for kept in (same, {name: each for name, each in same.items() if name != "lm_head.weight"}):
        save_file(kept, saved / "model.safetensors", {"format": "pt"})
        model = build_network(LanguageModelConfig(path=saved))
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tokenizer_of_another_model_is_refused(saved: Path) -> None:
    added = load_tokenizer(LanguageModelConfig(path=saved))
    added.add_tokens(["one", "two"])
    added.save_pretrained(saved)
    with pytest.raises(ConfigError, match="has 20 tokens and the model's embedding 18"):
        build_network(LanguageModelConfig(path=saved))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_token_outside_of_the_vocabulary_is_refused(name: str, saved: Path) -> None:
    content = json.loads((saved / name).read_text())
    (saved / name).write_text(json.dumps({**content, "eos_token_id": [1, 400]}))
    with pytest.raises(ConfigError, match=f"end token 400 of {name}"):
        build_network(LanguageModelConfig(path=saved))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no model configuration"),
        ("model.safetensors", "no weights: model.safetensors"),
        ("", "there is no directory"),
    ],
)
def test_missing_files_are_named(missing: str, message: str, saved: Path) -> None:
    if missing:
        (saved / missing).unlink()
        (saved / "pytorch_model.bin").write_bytes(b"pickled weights are not read")
    else:
        shutil.rmtree(saved)
    with pytest.raises(ConfigError, match=message) as caught:
        build_network(LanguageModelConfig(path=saved))
    assert caught.value.key == "path"


@pytest.mark.parametrize(
    "given", ["", "mode", "model/model.safetensors", "model/adapter", "checkpoints/step_00000002"]
)
def test_the_model_of_a_run_is_named_where_another_place_of_it_is_given(
    given: str, saved: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for place in ("checkpoints/step_00000002", "model/adapter"):
        (run / place).mkdir(parents=True)
    shutil.copytree(saved, run / "model", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=f"; nearest: {run / 'model'}$"):
        LanguageModelConfig(path=run / given).check()


def test_only_adapters_are_trained_and_they_can_be_merged(saved: Path, tmp_path: Path) -> None:
    config = LanguageModelConfig(path=saved, lora=LoraConfig(rank=2, alpha=6.0))
    model = build_network(config, seed=1)
    again, plain = (
        build_network(config, seed=1),
        build_network(LanguageModelConfig(path=saved)),
    )
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert torch.allclose(_logits(model), _logits(plain), atol=1e-6)
    for (name, one), (_, other) in zip(adapter_weights(model), adapter_weights(again), strict=True):
        assert torch.equal(one, other), name

    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.normal_(std=0.3)
    assert not torch.allclose(_logits(model), _logits(plain), atol=1e-2)
    assert dict(full_weights(model)).keys() == plain.state_dict().keys()
    plain.load_state_dict(dict(full_weights(model)))
    assert torch.allclose(_logits(model), _logits(plain), atol=1e-5)

    save_language_model(model, tmp_path / "merged", tokenizer=load_tokenizer(config))
    merged = build_network(LanguageModelConfig(path=tmp_path / "merged"))
    assert torch.equal(_logits(merged), _logits(plain))


def test_the_names_of_adapters_are_those_of_their_file(saved: Path, tmp_path: Path) -> None:
    model = build_network(LanguageModelConfig(path=saved, lora=LoraConfig()), seed=1)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    given = dict(adapter_weights(model))
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in written)


def test_an_unknown_layer_gets_no_adapter(saved: Path) -> None:
    lora = LoraConfig(target_modules=("q_proj", "query"))
    with pytest.raises(ConfigError, match=r"no linear layer query; legal: .*q_proj"):
        build_network(LanguageModelConfig(path=saved, lora=lora))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"hidden_size": 100, "heads": 8}, "nearest: 96"),
        ({"heads": 6, "kv_heads": 4, "hidden_size": 48}, "nearest: 3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(section: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArchitectureConfig.model_validate(section)


def test_the_configuration_is_checked_without_torch() -> None:
    code = (
        "import sys, rlinf.models.language_config, rlinf.engines.config\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_of_one_process_load_the_same_model(tokenizer_path: Path, tmp_path: Path) -> None:
    config = LanguageModelConfig(path=tokenizer_path, architecture=SMALL)
    model, tokenizer = build_language_model(config, seed=3)
    save_language_model(model, tmp_path / "model", tokenizer=tokenizer)
    saved = LanguageModelConfig(path=tmp_path / "model")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build_network(saved), range(4)))
    expected = model.state_dict()
    for other in found:
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
