"""The engine on transformers models: exact, alone as in a batch, and continued after aborts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.engines import hf
from rlinf.engines.config import HFEngineConfig, SamplingConfig
from rlinf.engines.conformance_subject import VOCABULARY as LETTERS
from rlinf.engines.conformance_subject import Subject
from rlinf.engines.engine_conformance import check_engine
from rlinf.engines.protocol import GenerationRequest, ModelSource
from rlinf.errors import ConfigError

from .conftest import VOCABULARY, requests, scores

Build = Callable[..., Any]

EXACT = {"deterministic": True, "block_size": 4}


def _same(one: list[Any], other: list[Any], *, bits: bool) -> bool:
    return all(
        left.request_id == right.request_id
        and np.array_equal(left.completion.tokens, right.completion.tokens)
        and left.completion.stop_reason == right.completion.stop_reason
        and (not bits or np.array_equal(left.completion.log_probs, right.completion.log_probs))
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("config", [{}, EXACT, {"on_update": "keep"}])
def test_it_conforms(config: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    results = check_engine(HFEngineConfig(**config))
    assert len(results) == 31
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize("config", [{}, EXACT])
def test_latent_attention_scores_what_the_model_does(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSeek-V3: values are narrower than keys, and routers have buffers of their own."""
    pytest.importorskip("transformers")
    from tests.trainers.language_models import model

    of = model("deepseek_v3", tied=False, vocab_size=LETTERS, max_position_embeddings=512)
    of.eval().save_pretrained(tmp_path)
    with HFEngineConfig(dtype="float32", **config).build(ModelSource(path=tmp_path)) as engine:
        subject = Subject(engine, of)
        for _ in range(3):
            asked = subject.requests(7)
            assert subject.error(asked, engine.generate(asked)) < 1e-5
            subject.update()


@pytest.mark.parametrize("config", [{}, EXACT])
def test_a_sequence_does_not_depend_on_the_batch(config: dict[str, Any], build: Build) -> None:
    asked = requests(30, temperature=0.9)
    crowded = build(max_running_requests=30, **config).generate(asked)
    for places in (1, 7):
        own = config or {"max_prefill_tokens": 40}
        other = build(max_running_requests=places, **own).generate(asked)
        assert _same(crowded, other, bits=bool(config))
    backwards = build(max_running_requests=11, **config).generate(asked[::-1])
    assert _same(crowded, backwards[::-1], bits=bool(config))


@pytest.mark.parametrize("config", [{}, EXACT])
def test_log_probs_are_those_of_a_full_forward(
    config: dict[str, Any], build: Build, model: Any
) -> None:
    asked = requests(20, temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2)
    for request, item in zip(asked, build(**config).generate(asked), strict=True):
        expected = scores(model, request, item.completion.tokens)
        assert np.abs(expected - item.completion.log_probs).max() < 1e-5


@pytest.mark.parametrize("config", [{}, EXACT])
@pytest.mark.parametrize("steps", [1, 4, 13])
def test_what_was_aborted_goes_on_as_if_it_had_not_been(
    steps: int, config: dict[str, Any], build: Build
) -> None:
    asked = requests(18)
    whole = build(max_running_requests=8, **config).generate(asked)
    engine = build(max_running_requests=8, **config)
    for request in asked:
        engine.submit(request)
    finished = [item for _ in range(steps) for item in engine.step()]
    aborted = engine.abort()
    assert len(finished) + len(aborted) == len(asked)
    partial = {item.request_id: item.completion for item in aborted}
    assert any(len(part) for part in partial.values())
    again = [replace(asked[n], partial=part if len(part) else None) for n, part in partial.items()]
    finished += build(max_running_requests=5, **config).generate(again)
    finished.sort(key=lambda item: item.request_id)
    assert _same(whole, finished, bits=bool(config))


def _interrupted(engine: Any, asked: dict[int, GenerationRequest]) -> list[GenerationRequest]:
    """Everything that is unfinished, as it would arrive at another engine."""
    ended = pickle.loads(pickle.dumps(engine.interrupt()))
    parts = [(item, item.completion if len(item.completion) else None) for item in ended]
    return [replace(asked[i.request_id], partial=part, cache=i.cache) for i, part in parts]


@pytest.mark.parametrize("config", [{}, EXACT])
def test_what_was_interrupted_goes_on_with_its_caches(
    config: dict[str, Any], model: Any, build: Build
) -> None:
    asked = {request.request_id: request for request in requests(18)}
    whole = build(max_running_requests=9, **config).generate(asked.values())
    going = list(asked.values())
    finished, begun = [], 0
    # The second one is interrupted while some wait that have their caches from the first.
    for running, steps in ((9, 6), (5, 1), (7, 1000)):
        engine = build(copy.deepcopy(model), max_running_requests=running, **config)
        read: list[int] = []
        engine._model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs, read=read: read.append(inputs[0].shape[1])
        )
        begun = sum(request.cache is not None for request in going)
        for request in going:
            engine.submit(request)
        finished += engine.step()
        assert begun < running or set(read) == {1}
        for _ in range(steps - 1):
            finished += engine.step()
        going = _interrupted(engine, asked)
    assert begun >= 7
    assert going == []
    finished.sort(key=lambda item: item.request_id)
    assert _same(whole, finished, bits=bool(config))


def test_caches_of_other_weights_are_of_no_use(model: Any, build: Build) -> None:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    asked = {request.request_id: request for request in requests(8, longest=40)}
    first = build(**EXACT)
    for request in asked.values():
        first.submit(request)
    for _ in range(6):
        first.step()
    going = _interrupted(first, asked)
    assert all(request.cache is not None for request in going)
    second, third = build(changed, **EXACT), build(changed, **EXACT)
    for engine in (second, third):
        engine.update_weights((), 1)
    without = third.generate(replace(request, cache=None) for request in going)
    assert _same(second.generate(going), without, bits=True)


def test_an_update_in_between_can_be_repeated_to_the_bit(model: Any, build: Build) -> None:
    """Uninterrupted across an update, or aborted after it and continued: the same bits."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    asked = requests(8, longest=40)

    def run(*, interrupt: bool) -> list[Any]:
        own = copy.deepcopy(model)
        engine = build(own, **EXACT)
        for request in asked:
            engine.submit(request)
        finished = [item for _ in range(6) for item in engine.step()]
        own.load_state_dict(changed.state_dict())
        engine.update_weights((), 1)
        finished += [item for _ in range(5) for item in engine.step()]
        if interrupt:
            parts = engine.abort()
            engine = build(own, **EXACT)
            engine.update_weights((), 1)
            for item in parts:
                engine.submit(replace(asked[item.request_id], partial=item.completion))
        while engine.unfinished:
            finished += engine.step()
        return sorted(finished, key=lambda item: item.request_id)

    through, interrupted = run(interrupt=False), run(interrupt=True)
    assert _same(through, interrupted, bits=True)
    assert any(len(set(item.completion.versions)) == 2 for item in through)


def test_a_module_of_its_own_shares_nothing(model: Any) -> None:
    with HFEngineConfig().build(ModelSource(module=copy.deepcopy(model), shared=False)) as engine:
        with pytest.raises(ValueError, match="shares none"):
            engine.update_weights((), 1)
        engine.update_weights(model.state_dict().items(), 1)
        expected = engine.generate(requests(3))
        engine.release_memory()
        engine.restore_memory()
        assert _same(expected, engine.generate(requests(3)), bits=True)


@pytest.mark.gpu
def test_a_module_of_its_own_is_computed_with_on_the_accelerator(model: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with HFEngineConfig().build(ModelSource(module=model)) as engine:
        assert engine._model.device.type == "cpu"
    config = HFEngineConfig()
    with config.build(ModelSource(module=copy.deepcopy(model), shared=False)) as engine:
        assert {tensor.device.type for tensor in engine._model.state_dict().values()} == {"cuda"}
        engine.generate(requests(3))
        engine.release_memory()
        assert engine._model.device.type == "cpu"
        engine.restore_memory()
        assert engine._model.device.type == "cuda"
        engine.generate(requests(3))


def test_weights_are_shared_with_the_module_and_the_module_is_left_alone(
    model: Any, build: Build
) -> None:
    own = copy.deepcopy(model)
    before = own.config._attn_implementation
    engine = build(own)
    asked = requests(6)
    first = engine.generate(asked)
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    own(torch.arange(2, 12)[None]).logits.square().mean().backward()
    optimizer.step()
    engine.update_weights((), 5)
    second = engine.generate(asked)
    assert own.training
    assert own.config._attn_implementation == before
    assert not _same(first, second, bits=True)
    assert {int(v) for item in second for v in item.completion.versions} == {5}
    for request, item in zip(asked, second, strict=True):
        expected = scores(own, request, item.completion.tokens)
        assert np.abs(expected - item.completion.log_probs).max() < 1e-5


def test_adopted_weights_are_computed_with_where_they_lie(model: Any, build: Build) -> None:
    own = {name: value.clone() for name, value in model.state_dict().items()}
    engine, asked = build(copy.deepcopy(model)), requests(6)
    before = model.lm_head.weight.clone()
    for version in (1, 2):
        for value in own.values():
            value.mul_(1.2)
        engine.adopt_weights(own.items(), version)
        expected = copy.deepcopy(model)
        expected.load_state_dict(own)
        for request, item in zip(asked, engine.generate(asked), strict=True):
            found = item.completion
            assert np.abs(scores(expected, request, found.tokens) - found.log_probs).max() < 1e-5
            assert set(found.versions) == {version}
    engine.update_weights((), 3)
    assert engine._model.lm_head.weight.data_ptr() == own["lm_head.weight"].data_ptr()
    assert torch.equal(model.lm_head.weight, before)
    with pytest.raises(ValueError, match="1 weights of the model are missing"):
        engine.adopt_weights(list(own.items())[1:], 4)


def test_another_number_format_needs_weights_of_its_own(model: Any, build: Build) -> None:
    engine = build(dtype="bfloat16")
    with pytest.raises(ValueError, match="shares none"):
        engine.update_weights((), 1)
    engine.update_weights(model.state_dict().items(), 1)
    asked = requests(6)
    differences = [
        np.abs(scores(model, request, item.completion.tokens) - item.completion.log_probs).max()
        for request, item in zip(asked, engine.generate(asked), strict=True)
    ]
    assert 0 < max(differences) < 0.2


def test_equal_prompts_are_computed_once(model: Any, build: Build) -> None:
    own = copy.deepcopy(model)
    engine = build(own, max_running_requests=3)
    seen: list[tuple[int, ...]] = []
    embedding = engine._model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    prompt = np.arange(2, 12)
    how = SamplingConfig(max_new_tokens=4, stop_token_ids=())
    engine.generate(
        GenerationRequest(request_id=n, prompt_tokens=prompt, seed=n, sampling=how)
        for n in range(9)
    )
    assert [shape for shape in seen if shape[1] > 1] == [(1, 10)]
    engine.update_weights((), 1)
    engine.generate([GenerationRequest(request_id=0, prompt_tokens=prompt, seed=0, sampling=how)])
    assert [shape for shape in seen if shape[1] > 1] == [(1, 10)] * 2


def test_long_prompts_do_not_pad_short_ones(model: Any, build: Build) -> None:
    own = copy.deepcopy(model)
    engine = build(own)
    seen: list[tuple[int, ...]] = []
    embedding = engine._model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    lengths = [9, 200, 10, 8, 190, 10]
    how = SamplingConfig(max_new_tokens=5, stop_token_ids=())
    rng = np.random.default_rng(0)
    asked = [
        GenerationRequest(
            request_id=number,
            prompt_tokens=rng.integers(2, VOCABULARY, length),
            seed=number,
            sampling=how,
        )
        for number, length in enumerate(lengths)
    ]
    answers = engine.generate(asked)
    assert [shape for shape in seen if shape[1] > 1] == [(4, 10), (2, 200)]
    alone = [build().generate([request])[0] for request in asked]
    assert _same(sorted(answers, key=lambda answer: answer.request_id), alone, bits=False)


def test_interrupted_sequences_are_read_some_at_a_time(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes over many of them goes on with its own in between."""
    monkeypatch.setitem(hf._READ, "cpu", 40)
    how = SamplingConfig(max_new_tokens=30, stop_token_ids=())
    asked = [replace(request, sampling=how) for request in requests(9)]
    own, others = asked[-1], asked[:-1]
    former = build()
    for request in others:
        former.submit(request)
    for _ in range(12):
        former.step()
    engine = build()
    engine.submit(own)
    engine.step()
    for item in former.abort():
        engine.submit(replace(asked[item.request_id], partial=item.completion))
    running, finished = [], []
    while engine.unfinished:
        finished += engine.step()
        running.append(len(engine._running))
        if len(running) < 5:
            assert engine.progress()[own.request_id] == 1 + len(running)
    assert running[0] < running[1] < max(running) == len(asked)
    finished.sort(key=lambda item: item.request_id)
    assert _same(build().generate(asked), finished, bits=False)


def test_the_batch_is_filled_up_between_steps(build: Build) -> None:
    lengths = [20, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    asked = [
        replace(request, sampling=SamplingConfig(max_new_tokens=length, stop_token_ids=()))
        for request, length in zip(requests(10), lengths, strict=True)
    ]
    engine = build(max_running_requests=2)
    for request in asked:
        engine.submit(request)
    steps = 0
    while engine.unfinished:
        engine.step()
        steps += 1
    assert steps == 20


def test_limits_of_length_and_the_end_token_of_the_model(build: Build) -> None:
    asked = requests(60, longest=200, max_new_tokens=200)
    finished = build().generate(asked)
    ended = [item.completion for item in finished if item.completion.stop_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.tokens[-1] == 1
        assert 1 not in completion.tokens[:-1]
    shortest = requests(20, longest=30, max_new_tokens=30, min_new_tokens=25)
    assert min(len(item.completion) for item in build().generate(shortest)) >= 25


def test_an_end_token_beyond_the_vocabulary_is_never_drawn(build: Build) -> None:
    how = {"max_new_tokens": 12, "min_new_tokens": 6}
    own = build().generate(requests(6, longest=20, stop_token_ids=(1,), **how))
    more = build().generate(requests(6, longest=20, stop_token_ids=(1, VOCABULARY + 9), **how))
    for one, other in zip(own, more, strict=True):
        assert np.array_equal(one.completion.tokens, other.completion.tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": np.zeros(0, np.int64)}, "P >= 1"),
        ({"prompt_tokens": np.array([VOCABULARY])}, "not within"),
        ({"seed": -1}, "negative"),
        ({"request_id": 0}, "unfinished"),
    ],
)
def test_impossible_requests_are_refused(
    change: dict[str, Any], message: str, build: Build
) -> None:
    engine, (request,) = build(), requests(1)
    engine.submit(request)
    with pytest.raises(ValueError, match=message):
        engine.submit(replace(request, **{"request_id": 1, **change}))
    assert engine.unfinished == 1


def test_a_request_beyond_the_context_is_refused(build: Build) -> None:
    (request,) = requests(1, max_new_tokens=256)
    with pytest.raises(ConfigError, match="nearest: 2"):
        build().submit(request)


def test_stop_texts_need_a_tokenizer(build: Build) -> None:
    (request,) = requests(1, stop=("x",))
    with pytest.raises(ConfigError, match="need a tokenizer"):
        build().submit(request)


def test_a_stop_text_from_before_the_shortest_length_ends_nothing(model: Any) -> None:
    letters = SimpleNamespace(decode=lambda tokens: "".join(chr(48 + token) for token in tokens))
    engine = HFEngineConfig().build(ModelSource(module=model, tokenizer=letters))
    (request,) = requests(1, max_new_tokens=20, stop_token_ids=())
    said = letters.decode(engine.generate([request])[0].completion.tokens)
    early, late = said[3:5], said[9:11]
    assert early not in said[6:]
    for stop, minimum, length, reason in (
        ((early,), 0, 5, "stop"),
        ((early,), 5, 5, "stop"),
        ((early,), 6, 20, "length"),
        ((early, late), 6, 11, "stop"),
    ):
        update = {"stop": stop, "min_new_tokens": minimum}
        how = replace(request, sampling=request.sampling.model_copy(update=update))
        completion = engine.generate([how])[0].completion
        assert (len(completion), completion.stop_reason) == (length, reason)


def test_a_model_with_other_attention_is_refused(model: Any) -> None:
    own = copy.deepcopy(model)
    own.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match="sliding_attention"):
        HFEngineConfig().build(ModelSource(module=own))


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("bloom", {"n_layer": 1, "n_head": 2}, "AttributeError in a first forward pass"),
        (
            "nemotron",
            {
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 8,
            },
            "its layers attend by code of their own",
        ),
    ],
)
def test_a_model_that_attends_by_code_of_its_own_is_refused(
    kind: str, sizes: dict[str, int], why: str
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=16, hidden_size=8, **sizes)
    own = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"models of type {kind}: {why}.*use the engine `vllm`"):
        HFEngineConfig().build(ModelSource(module=own))


def test_it_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="a module or a directory"):
        HFEngineConfig().build(ModelSource())
