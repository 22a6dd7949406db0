"""Models that read pictures: engine, trainer and transformers say the same, to rounding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch
from transformers import AutoModelForImageTextToText

from rlinf.data.pictures import Picture, positions_of, shift_of
from rlinf.data.sequences import Completion
from rlinf.engines.config import HFEngineConfig, SamplingConfig
from rlinf.engines.hf import HFEngine
from rlinf.engines.protocol import GenerationRequest, ModelSource
from rlinf.errors import ConfigError
from rlinf.models.adapters import inject_adapters
from rlinf.models.language import build_network
from rlinf.models.language_config import LoraConfig
from rlinf.models.vision_language import vision_of
from rlinf.trainers.config import FSDPTrainerConfig
from rlinf.trainers.language_trainers import policy_trainer, save_pretrained, text_batch
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.scoring import TokenScorer
from tests.trainers.language_models import algorithm
from tests.vision import Tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ONE = pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
"""For what does not depend on the family."""
TOLERANCE = 1e-5
NEW = 6


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def two_pictures(tiny: Tiny) -> Any:
    """A prompt with two pictures of unequal sizes, text between and behind them."""
    first, second = (next(p for p in tiny.prompts if p.level == level) for level in (2, 3))
    tokens = np.concatenate([first.tokens, second.tokens])
    (one,), (two,) = first.pictures, second.pictures
    moved = replace(two, first=two.first + len(first.tokens))
    return replace(second, tokens=tokens, pictures=(one, moved))


def engine_of(tiny: Tiny, **config: Any) -> HFEngine:
    source = ModelSource(path=tiny.path, module=tiny.model, tokenizer=tiny.tokenizer)
    engine = HFEngineConfig(**config).build(source)
    assert isinstance(engine, HFEngine)
    return engine


def requests(prompts: list[Any], **sampling: Any) -> list[GenerationRequest]:
    how = SamplingConfig(**{"max_new_tokens": NEW, "stop_token_ids": (), **sampling})
    return [
        GenerationRequest(
            request_id=number,
            prompt_tokens=prompt.tokens,
            pictures=prompt.pictures,
            seed=number,
            sampling=how,
        )
        for number, prompt in enumerate(prompts)
    ]


def scorer_of(tiny: Tiny, *, packing: bool) -> TokenScorer:
    return TokenScorer(
        copy.deepcopy(tiny.model), packing=packing, logits_per_chunk=1 << 20, reader=tiny.reader
    )


def batch_of(answered: list[tuple[Any, np.ndarray]]) -> Any:
    texts = [(prompt.tokens, answer) for prompt, answer in answered]
    return text_batch(texts, pictures=[prompt.pictures for prompt, _ in answered])


def test_positions_are_those_of_the_library(tiny, two_pictures):
    wide = Picture(data=np.zeros(1, np.uint8), first=3, rows=1, columns=4)
    ids, arguments = tiny.arguments(two_pictures)
    found, delta = tiny.model.model.get_rope_index(
        ids,
        mm_token_type_ids=arguments["mm_token_type_ids"],
        image_grid_thw=arguments["image_grid_thw"],
    )
    own = positions_of(ids.shape[1], two_pictures.pictures)
    assert (found[:, 0].numpy() == own).all()
    assert int(delta) == shift_of(two_pictures.pictures) < 0
    assert positions_of(9, (wide,))[:, 3:].tolist() == [
        [3, 3, 3, 3, 7, 8],
        [3, 3, 3, 3, 7, 8],
        [3, 4, 5, 6, 7, 8],
    ]
    assert shift_of((wide,)) == 0


def test_greedy_answers_are_those_of_the_library(tiny, two_pictures):
    prompts = [*tiny.prompts[:4], two_pictures]
    answers = engine_of(tiny).generate(requests(prompts, greedy=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, arguments = tiny.arguments(prompt)
        whole = tiny.model.generate(
            ids, **arguments, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )
        assert answer.completion.tokens.tolist() == whole[0, ids.shape[1] :].tolist()
    tiny.model.model.rope_deltas = None


def test_engine_and_trainer_say_what_the_library_says(tiny, two_pictures):
    text = replace(tiny.prompts[0], tokens=tiny.prompts[0].tokens[-4:], pictures=())
    prompts = [*tiny.prompts[:3], two_pictures, text]
    answers = [done.completion for done in engine_of(tiny).generate(requests(prompts))]
    sampled = torch.stack([torch.from_numpy(answer.log_probs) for answer in answers])
    for row, (prompt, answer) in enumerate(zip(prompts[:4], answers[:4], strict=True)):
        assert (tiny.said(prompt, answer.tokens) - sampled[row]).abs().max() < TOLERANCE
    batch = batch_of([(p, a.tokens) for p, a in zip(prompts, answers, strict=True)])
    for packing in (True, False):
        scores = scorer_of(tiny, packing=packing)(batch).log_probs
        assert (scores - sampled).abs().max() < TOLERANCE
        alone = scorer_of(tiny, packing=packing)(batch.select(slice(4, 5))).log_probs
        assert (alone - sampled[4:]).abs().max() < TOLERANCE
        plain = text_batch([(text.tokens, answers[4].tokens)])
        assert plain.pictures is None
        scores = scorer_of(tiny, packing=packing)(plain).log_probs
        assert (scores - sampled[4:]).abs().max() < TOLERANCE


@ONE
def test_equal_tokens_with_another_picture_are_another_prompt(tiny):
    first, second = [p for p in tiny.prompts if p.level == 2][:2]
    other = replace(first, pictures=second.pictures)
    answers = engine_of(tiny).generate(requests([first, other, first], greedy=True, temperature=1))
    logged = [answer.completion.log_probs for answer in answers]
    assert np.abs(logged[0] - logged[1]).max() > 1e-3
    assert np.abs(logged[0] - logged[2]).max() < TOLERANCE
    pairs = [(p, answers[0].completion.tokens) for p in (first, other, first)]
    scores = scorer_of(tiny, packing=True)(batch_of(pairs)).log_probs
    assert (scores[0] - tiny.said(first, pairs[0][1])).abs().max() < TOLERANCE
    assert (scores[1] - tiny.said(other, pairs[0][1])).abs().max() < TOLERANCE


@ONE
def test_a_sampled_token_of_pictures_is_a_token_like_any_other(tiny):
    prompt, place = tiny.prompts[0], tiny.reader.place_token
    said = Completion(
        tokens=np.array([place, 3, place]),
        log_probs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int64),
        stop_reason="abort",
        seed=0,
    )
    (request,) = requests([prompt])
    (done,) = engine_of(tiny).generate([replace(request, partial=said)])
    answer = done.completion
    assert answer.tokens[:3].tolist() == [place, 3, place]
    for packing in (True, False):
        scores = scorer_of(tiny, packing=packing)(batch_of([(prompt, answer.tokens)])).log_probs
        logged = torch.from_numpy(answer.log_probs)
        assert (scores[0, 3:] - logged[3:]).abs().max() < TOLERANCE


@ONE
def test_answers_go_on_with_their_pictures_under_new_weights(tiny):
    first = requests(tiny.prompts[:3], max_new_tokens=8)
    source = ModelSource(
        path=tiny.path, module=copy.deepcopy(tiny.model), shared=False, tokenizer=tiny.tokenizer
    )
    engine = HFEngineConfig().build(source)
    for request in first:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    changed = {name: value * 1.1 for name, value in tiny.model.state_dict().items()}
    engine.update_weights(changed.items(), 1)
    found: list[Any] = []
    while engine.unfinished:
        found += engine.step()
    scorer = scorer_of(tiny, packing=True)
    scorer.model.load_state_dict(changed)
    for item in found:
        prompt, answer = tiny.prompts[item.request_id], item.completion
        scores = scorer(batch_of([(prompt, answer.tokens)])).log_probs[0]
        new = torch.from_numpy(answer.versions == 1)
        assert new.sum() >= 4
        assert (scores - torch.from_numpy(answer.log_probs))[new].abs().max() < TOLERANCE


@ONE
def test_an_engine_that_loads_files_reads_pictures(tiny, tmp_path):
    prompts = tiny.prompts[:2]
    tiny.model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((tiny.path / name).read_bytes())
    loaded = HFEngineConfig().build(ModelSource(path=tmp_path))
    answers = loaded.generate(requests(prompts))
    shared = engine_of(tiny).generate(requests(prompts))
    for one, two in zip(answers, shared, strict=True):
        assert one.completion.tokens.tolist() == two.completion.tokens.tolist()


@ONE
def test_gradients_reach_pictures_unless_they_are_frozen(tiny):
    answers = [(prompt, np.array([3, 4, 5])) for prompt in tiny.prompts[:2]]
    scorer = scorer_of(tiny, packing=True)
    scorer(batch_of(answers)).log_probs.sum().backward()
    assert all(p.grad is not None for p in scorer.parameters())
    assert all(p.grad.abs().sum() > 0 for p in vision_of(scorer).parameters() if p.dim() > 1)
    frozen = build_network(tiny.section.model_copy(update={"freeze_vision": True}))
    trained = {name for name, p in frozen.named_parameters() if p.requires_grad}
    assert trained
    assert not any("visual" in name for name in trained)
    # A part of a batch without pictures computes the vision part all the same, for nothing.
    text = replace(tiny.prompts[0], tokens=tiny.prompts[0].tokens[-4:], pictures=())
    scorer.zero_grad()
    part = batch_of([*answers, (text, np.array([3]))]).select(slice(2, 3))
    scorer(part).log_probs.sum().backward()
    assert all(p.grad is not None for p in scorer.parameters())
    assert all(p.grad.abs().sum() == 0 for p in vision_of(scorer).parameters())


@ONE
def test_adapters_are_in_the_language_part_unless_asked_otherwise(tiny):
    plain, both = copy.deepcopy(tiny.model), copy.deepcopy(tiny.model)
    inject_adapters(plain, LoraConfig(rank=2), seed=0)
    inject_adapters(both, LoraConfig(rank=2, vision=True), seed=0)
    names = {n for n, p in plain.named_parameters() if p.requires_grad}
    assert names
    assert not any("visual" in name for name in names)
    assert any("visual" in n for n, p in both.named_parameters() if p.requires_grad)
    with pytest.raises(ConfigError, match="no linear layer qkv"):
        inject_adapters(copy.deepcopy(tiny.model), LoraConfig(target_modules=("qkv",)), seed=0)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_a_trained_model_is_written_as_the_published_ones_are(tiny, tmp_path, lora):
    config = FSDPTrainerConfig(lora=lora, optim={"lr": 1e-2})
    trainer = policy_trainer(
        copy.deepcopy(tiny.model),
        algorithm(),
        config,
        ranks=Ranks(),
        total_steps=1,
        seed=0,
        reader=tiny.reader,
    )
    save_pretrained(trainer, tmp_path)
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own = tiny.model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, own[name]), name
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        first = "model.layers.0." if "2_5" in type(loaded).__name__ else "model.language_model."
        assert any(key.startswith(first) for key in file.keys())  # noqa: SIM118 - no mapping


@ONE
def test_what_cannot_read_pictures_says_so(tiny):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 64}  # fmt: skip
    text = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    engine = HFEngineConfig().build(ModelSource(module=text))
    with pytest.raises(ConfigError, match="has pictures, which this engine and model do not read"):
        engine.submit(requests(tiny.prompts[:1])[0])
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM reads text only"):
        TokenScorer(text, packing=True, logits_per_chunk=1, reader=tiny.reader)
    scorer = TokenScorer(tiny.model, packing=False, logits_per_chunk=1)
    with pytest.raises(ConfigError, match="nothing says how they are read"):
        scorer(batch_of([(tiny.prompts[0], np.array([3]))]))
