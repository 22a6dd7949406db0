"""An adapter is continued from as it was saved, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlinf.errors import ConfigError
from rlinf.models.adapters import adapter_file_name, inject_adapters, is_adapter
from rlinf.models.language_config import AdapterConfig, LoraConfig

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


def _model(*, tied: bool = False) -> Any:
    config = Qwen2Config(**SIZES, num_hidden_layers=1, tie_word_embeddings=tied)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def _adapter(model: Any) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {adapter_file_name(name): p.detach() for name, p in named if is_adapter(name)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An adapter of rank 4 and alpha 8 whose values are all random."""
    model = _model()
    settings = inject_adapters(model, LoraConfig(rank=4, alpha=8.0), seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        values = {name: torch.randn(value.shape) for name, value in _adapter(model).items()}
    save_file(values, tmp_path / FILE)
    settings.save_pretrained(str(tmp_path))
    return tmp_path


def test_a_saved_adapter_is_continued_from(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    model = _model()
    path = Path("~") / saved.name
    inject_adapters(model, LoraConfig(rank=4, alpha=8.0, path=path), seed=1)
    expected = load_file(saved / FILE)
    found = _adapter(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_saved_adapter_finds_the_model_that_it_belongs_to(tmp_path: Path) -> None:
    base, own = tmp_path / "base", tmp_path / "own"
    _model().save_pretrained(base)
    model = Qwen2ForCausalLM.from_pretrained(base)
    settings = inject_adapters(model, LoraConfig(rank=4), seed=1)
    own.mkdir()
    save_file(_adapter(model), own / FILE)
    settings.save_pretrained(str(own))
    loaded = AutoPeftModelForCausalLM.from_pretrained(own)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rank": 4}, "rank 4 and alpha 8, the section rank 4 and alpha 4; legal with it: rank 4"),
        ({"rank": 8, "alpha": 8.0}, "legal with it: rank 4, alpha 8"),
        (
            {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]},
            r"unknown here: base_model.model.model.layers.0.*lora_A.weight.* and 9 more",
        ),
    ],
)
def test_an_adapter_of_another_section_is_refused(
    section: dict[str, Any], message: str, saved: Path
) -> None:
    config = LoraConfig.model_validate({**section, "path": str(saved)})
    with pytest.raises(ConfigError, match=message) as caught:
        inject_adapters(_model(), config, seed=1)
    assert caught.value.key == "actor.lora.path"


def _without_a_layer(directory: Path) -> None:
    values = load_file(directory / FILE)
    kept = {name: value for name, value in values.items() if "q_proj" not in name}
    save_file(kept, directory / FILE)


def _of_another_width(directory: Path) -> None:
    values = load_file(directory / FILE)
    save_file({name: value.repeat(1, 2) for name, value in values.items()}, directory / FILE)


def _scaled_otherwise(directory: Path) -> None:
    settings = json.loads((directory / SETTINGS).read_text())
    (directory / SETTINGS).write_text(json.dumps({**settings, "use_rslora": True}))


def _cut_off(directory: Path) -> None:
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_layer, "missing in its file: .*q_proj.lora_A.weight"),
        (_of_another_width, "of another shape: "),
        (_scaled_otherwise, "has use_rslora"),
        (_cut_off, "cannot be read"),
        (lambda directory: (directory / SETTINGS).unlink(), "holds no adapter_config.json"),
        (lambda directory: (directory / SETTINGS).write_text("[]"), "no settings of a LoRA"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    damage: Callable[[Path], Any], message: str, saved: Path
) -> None:
    damage(saved)
    model = _model()
    with pytest.raises(ConfigError, match=message) as caught:
        inject_adapters(model, LoraConfig(rank=4, alpha=8.0, path=saved), seed=1)
    assert caught.value.key == "actor.lora.path"
    assert not any(value.any() for name, value in _adapter(model).items() if "lora_B" in name)


def _mixture() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    layers = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    config = Qwen3MoeConfig(**SIZES, **experts, **layers, head_dim=8, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config)


def test_in_a_mixture_of_experts_attention_alone_is_adapted() -> None:
    model = _mixture()
    inject_adapters(model, LoraConfig(rank=4), seed=1)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in _adapter(model)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("name", ["up_proj", "gate"])
def test_experts_take_no_adapter(name: str) -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj", name))
    with pytest.raises(ConfigError, match=rf"{name} of a mixture .* legal: k_proj, .*q_proj"):
        inject_adapters(_mixture(), lora, seed=1)


def test_an_output_layer_that_is_the_input_embedding_takes_no_adapter() -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj", "lm_head"))
    with pytest.raises(ConfigError, match="lm_head has the weights of the input emb") as caught:
        inject_adapters(_model(tied=True), lora, seed=1)
    assert caught.value.key == "actor.lora.target_modules"
    legal = str(caught.value).partition("legal: ")[2]
    assert "q_proj" in legal
    assert "lm_head" not in legal
    own = _model()
    inject_adapters(own, lora, seed=1)
    assert any("lm_head" in name for name in _adapter(own))


def test_the_factor_of_an_adapter_is_alpha_over_its_rank() -> None:
    assert AdapterConfig(rank=4, alpha=10.0).scale == 2.5
    assert AdapterConfig(rank=4).scale == 1.0
