"""What SGLang is asked for, and what is made of its answers; a stand-in takes its place."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf.data.sequences import Completion
from rlinf.engines.config import SamplingConfig, SGLangEngineConfig
from rlinf.engines.protocol import GenerationRequest, ModelSource
from rlinf.engines.sglang import SGLangEngine
from rlinf.engines.vllm.base import Growing
from rlinf.errors import ConfigError

END, OTHER_END, CALL = 1, 2, 9
WRITTEN = (5, END, 6, CALL, 8, OTHER_END, *([5] * 20))
"""What the stand-in says after a prompt of one token; :data:`OTHER_END` ends it by its tokenizer
alone."""


class StandIn:
    """SGLang as far as it decides when a sequence ends (``Req.check_finished``)."""

    def __init__(self, **arguments: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.asked: list[dict[str, Any]] = []
        self.tokenizer_manager = self

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> dict[str, Any]:
        self.asked.append(sampling_params)
        said: list[int] = []
        reason: dict[str, Any] = {}
        while not reason:
            said.append(WRITTEN[len(input_ids) - 1 + len(said)])
            stops = {*sampling_params["stop_token_ids"], END, OTHER_END}
            if len(said) >= sampling_params["max_new_tokens"]:
                reason = {"type": "length", "length": len(said)}
            elif said[-1] in stops and not sampling_params["ignore_eos"]:
                reason = {"type": "stop", "matched": said[-1]}
        scored = [(-0.5, token, None) for token in said]
        return {"meta_info": {"finish_reason": reason, "output_token_logprobs": scored}}

    def abort_request(self, *, rid: str) -> None:
        """Too late: the sequence ends by itself."""

    def shutdown(self) -> None:
        self.loop.close()


@pytest.fixture
def engine(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine over the stand-in."""
    package = ModuleType("sglang")
    package.Engine = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", package)
    model.config.save_pretrained(tmp_path)
    built = SGLangEngine(SGLangEngineConfig(), ModelSource(path=tmp_path))
    yield built
    built.close()


def answered(engine: Any, *, turn_ends: Sequence[int] = (), **sampling: Any) -> Completion:
    """The answer to one prompt."""
    request = GenerationRequest(
        request_id=0, prompt_tokens=np.array([3]), seed=0,
        sampling=SamplingConfig(**{"max_new_tokens": 12, **sampling}), turn_ends=tuple(turn_ends),
    )  # fmt: skip
    (finished,) = engine.generate([request])
    return finished.completion


@pytest.mark.parametrize(
    ("stops", "turn_ends", "length", "reason"),
    [
        (None, (), 2, "stop"),
        ((CALL,), (), 4, "stop"),
        ((), (CALL,), 4, "stop"),
        ((OTHER_END,), (), 6, "stop"),
        ((4,), (), 12, "length"),
        ((), (), 12, "length"),
    ],
)
def test_an_answer_ends_at_its_own_stop_tokens_and_no_others(
    engine: Any, stops: Any, turn_ends: Any, length: int, reason: str
) -> None:
    completion = answered(engine, stop_token_ids=stops, turn_ends=turn_ends)
    assert tuple(completion.tokens) == WRITTEN[:length]
    assert completion.stop_reason == reason
    assert len(completion.log_probs) == len(completion.versions) == length


def test_where_no_token_ends_an_answer_it_is_generated_at_once(engine: Any) -> None:
    answered(engine, stop_token_ids=())
    (asked,) = engine._engine.asked
    assert asked["ignore_eos"]


def test_of_early_ends_an_abort_returns_what_is_unfinished(engine: Any) -> None:
    sampling = SamplingConfig(max_new_tokens=12, stop_token_ids=(CALL,))
    request = GenerationRequest(
        request_id=0, prompt_tokens=np.array([3]), seed=0, sampling=sampling
    )
    engine.submit(request)
    (finished,) = engine.abort()
    assert tuple(finished.completion.tokens) == WRITTEN[:2]
    assert finished.completion.stop_reason == "abort"


LETTERS = SimpleNamespace(decode=lambda tokens: "".join(chr(96 + token) for token in tokens))


def test_a_stop_text_that_an_interrupted_answer_began_ends_it(engine: Any) -> None:
    begun = Completion(
        tokens=np.array(WRITTEN[:2]), log_probs=np.full(2, -0.5, np.float32),
        versions=np.zeros(2, np.int64), stop_reason="abort", seed=0,
    )  # fmt: skip
    engine._tokenizer = LETTERS
    for stop, minimum, length, reason in (
        ("af", 0, 3, "stop"),
        ("afi", 0, 4, "stop"),
        ("afi", 4, 4, "stop"),
        ("afi", 5, 8, "length"),
        ("ea", 0, 8, "length"),  # which was there before
    ):
        sampling = SamplingConfig(
            max_new_tokens=8, min_new_tokens=minimum, stop_token_ids=(), stop=(stop,)
        )
        request = GenerationRequest(
            request_id=0, prompt_tokens=np.array([3]), seed=0, sampling=sampling, partial=begun,
            scored=False,
        )  # fmt: skip
        growing = Growing(request, LETTERS, list(WRITTEN[2:8]), [-0.5] * 6, [0] * 6)
        for finished in (*engine.generate([request]), growing.finished("length")):
            found = finished.completion
            assert tuple(found.tokens) == WRITTEN[:length]
            assert len(found.log_probs) == len(found.versions) == length
            assert found.stop_reason == reason


def test_a_penalty_that_is_not_for_the_prompt_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"repetition_penalty: .*not for .* the prompt"):
        answered(engine, repetition_penalty=1.1)
