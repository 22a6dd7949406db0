"""Sessions: turns on an engine, scored as the model scores the whole text, and cheap to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlinf.data.sequences import Completion
from rlinf.engines import prefill as prompt_reading
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import GenerationRequest
from rlinf.engines.sessions import Session, Sessions

from .conftest import VOCABULARY, scores

Build = Callable[..., Any]

EXACT = {"deterministic": True, "block_size": 4}
SAMPLING = SamplingConfig(max_new_tokens=60, stop_token_ids=(), temperature=0.9)
ENDS = tuple(range(2, VOCABULARY, 6))


def given(number: int, turn: int) -> np.ndarray:
    """What a tool might reply, of one to seven tokens."""
    rng = np.random.default_rng((number, turn))
    return rng.integers(2, VOCABULARY, rng.integers(1, 8))


def talk(sessions: Sessions, number: int, turns: int = 3) -> Session:
    """One session of some turns, alone."""
    session = sessions.open(given(number, 99), seed=number)
    for turn in range(turns):
        if turn:
            session.extend(given(number, turn))
        session.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12)
        session.wait()
    return session


def talk_together(sessions: Sessions, count: int, turns: int = 3) -> list[Session]:
    """The same sessions, all in flight at once, each going on as soon as it can."""
    opened = [sessions.open(given(number, 99), seed=number) for number in range(count)]
    for session in opened:
        session.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12)
    running = count
    while running:
        for session in sessions.step():
            turn = session.completion.turns
            if turn == turns:
                running -= 1
                continue
            session.extend(given(session.number, turn))
            session.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12)
    return opened


def same(one: Completion, other: Completion) -> bool:
    """Whether two completions are equal, to the bit."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "log_probs", "versions", "mask")
    )


@pytest.mark.parametrize("config", [{}, EXACT])
def test_turns_are_scored_as_the_model_scores_the_whole_text(
    config: dict[str, Any], build: Build, model: Any
) -> None:
    found = talk_together(Sessions(build(max_running_requests=5, **config)), 9)
    for session in found:
        completion = session.completion
        request = GenerationRequest(
            request_id=0, prompt_tokens=session.prompt_tokens, seed=0, sampling=SAMPLING
        )
        expected = scores(model, request, completion.tokens)
        mask = completion.mask
        assert np.abs(expected - completion.log_probs)[mask].max() < 1e-5
        assert (completion.log_probs[~mask] == 0).all()
        replies = np.concatenate([given(session.number, turn) for turn in (1, 2)])
        assert np.array_equal(completion.tokens[~mask], replies)
        last = session.turn
        assert np.array_equal(last.tokens, completion.tokens[completion.turn_start :])
        assert np.array_equal(last.log_probs, completion.log_probs[completion.turn_start :])
    assert {session.turn.stop_reason for session in found} == {"stop", "length"}


def test_a_session_is_the_same_to_the_bit_however_it_is_generated(build: Build) -> None:
    """Alone or in a crowd, with what was computed kept or read again, interrupted or not."""
    alone = [talk(Sessions(build(**EXACT)), number).completion for number in range(8)]
    crowd = talk_together(Sessions(build(max_running_requests=5, **EXACT)), 8)
    forgetful = talk_together(Sessions(build(**EXACT), cache_bytes=0), 8)
    for one, second, third in zip(alone, crowd, forgetful, strict=True):
        assert same(one, second.completion)
        assert same(one, third.completion)


def test_a_number_that_was_chosen_is_not_given_out_again(build: Build) -> None:
    sessions = Sessions(build())
    chosen = sessions.open([3], seed=0, number=2)
    assert [sessions.open([3], seed=0).number for _ in range(2)] == [3, 4]
    assert chosen.number == 2


def test_an_interrupted_turn_goes_on_elsewhere_to_the_same_bits(build: Build) -> None:
    whole = talk(Sessions(build(**EXACT)), 3).completion
    sessions = Sessions(build(**EXACT))
    session = talk(sessions, 3, turns=1)
    session.extend(given(3, 1))
    session.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12)
    sessions.step()
    ((_, cache),) = sessions.interrupt()
    assert session.turn.stop_reason == "abort"
    for kept in (cache, None):
        other = Sessions(build(**EXACT))
        on = other.open(session.prompt_tokens, seed=3, begun=session.completion, cache=kept)
        said = len(on.completion) - on.completion.turn_start
        on.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12 - said)
        on.wait()
        on.extend(given(3, 2))
        on.generate(SAMPLING, turn_ends=ENDS, max_turn_tokens=12)
        on.wait()
        assert same(whole, on.completion)


def _count_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    genuine = prompt_reading.prefill

    def counting(model: Any, texts: Any, *rest: Any, **named: Any) -> Any:
        read.append(sum(map(len, texts)))
        return genuine(model, texts, *rest, **named)

    monkeypatch.setattr(prompt_reading, "prefill", counting)
    return read


def test_no_turn_reads_the_ones_before_it_again(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, ends = np.arange(20) + 2, tuple(range(0, VOCABULARY, 2))
    sampling = SamplingConfig(max_new_tokens=100, stop_token_ids=())
    for kept in (1 << 30, 0):
        read = _count_read(monkeypatch)
        session = Sessions(build(), cache_bytes=kept).open(prompt, seed=1)
        expected = len(prompt)
        for turn in range(4):
            if turn:
                session.extend([5, 6])
                # All but the last token, which is the input of the next pass.
                expected += 0 if kept else len(prompt) + len(session.completion) - 1
            session.generate(sampling, turn_ends=ends)
            assert session.wait().stop_reason == "stop"
        assert sum(read) == expected
        monkeypatch.undo()


def test_what_is_kept_between_turns_is_bounded(build: Build) -> None:
    many = Sessions(build())
    talk_together(many, 1, turns=1)
    opened = [talk(many, number, turns=1) for number in range(12)]
    kept = many.kept_bytes
    assert kept > 0
    few = Sessions(build(), cache_bytes=kept // 3)
    for number in range(12):
        talk(few, number, turns=1)
        assert few.kept_bytes <= kept // 3
    for session in opened:
        session.close()
    assert many.kept_bytes < kept


def test_new_weights_between_turns_are_used_for_all_that_follows(build: Build, model: Any) -> None:
    import copy

    engine = build(copy.deepcopy(model))
    sessions = Sessions(engine)
    session = talk(sessions, 5, turns=1)
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data.mul_(1.1)
    engine.update_weights(changed.state_dict().items(), 1)
    session.extend(given(5, 1))
    session.generate(SAMPLING, turn_ends=ENDS)
    last = session.wait()
    request = GenerationRequest(
        request_id=0, prompt_tokens=session.prompt_tokens, seed=0, sampling=SAMPLING
    )
    expected = scores(changed, request, session.completion.tokens)
    assert np.abs(expected[session.completion.turn_start :] - last.log_probs).max() < 1e-5
    assert set(last.versions.tolist()) == {1}
    # A given token was read by nothing newer than what stands before it.
    before = session.completion.versions[: session.completion.turn_start]
    assert set(before.tolist()) == {0}


def test_a_stop_text_of_an_earlier_turn_ends_no_later_one(build: Build) -> None:
    class Letters:
        @staticmethod
        def decode(tokens: Any) -> str:
            return "".join(chr(60 + int(token)) for token in tokens)

    engine = build()
    engine._tokenizer = Letters()
    session = Sessions(engine).open([7, 8, 9], seed=0)
    every_letter = tuple(chr(60 + number) for number in range(VOCABULARY))
    sampling = SamplingConfig(
        max_new_tokens=30, min_new_tokens=3, stop_token_ids=(), stop=every_letter
    )
    session.generate(sampling)
    assert len(session.wait().tokens) == 3
    said = chr(60 + int(session.turn.tokens[-1]))
    session.extend([int(session.turn.tokens[0])])
    session.generate(sampling.model_copy(update={"stop": (said,), "min_new_tokens": 0}))
    last = Letters.decode(session.wait().tokens)
    assert said not in last[:-1]
    assert len(last) > 1 or last == said


def test_limits_of_a_turn_and_of_the_whole(build: Build) -> None:
    session = Sessions(build()).open([4, 5], seed=0)
    sampling = SamplingConfig(max_new_tokens=20, stop_token_ids=())
    session.generate(sampling, max_turn_tokens=8)
    assert len(session.wait().tokens) == 8
    session.extend([6] * 4)
    session.generate(sampling, max_turn_tokens=30)
    assert len(session.wait().tokens) == 8
    assert session.turn.stop_reason == "length"
    assert session.completion.turns == 2
    with pytest.raises(ValueError, match="leaves none"):
        session.generate(sampling)


def test_what_a_session_refuses(build: Build) -> None:
    sessions = Sessions(build())
    session = sessions.open(seed=0)
    with pytest.raises(ValueError, match="prompt"):
        session.generate(SAMPLING)
    assert not session.running
    session.extend([3, 4])
    with pytest.raises(RuntimeError, match="no turn"):
        session.wait()
    session.generate(SAMPLING)
    for forbidden in (lambda: session.extend([5]), lambda: session.generate(SAMPLING)):
        with pytest.raises(RuntimeError, match="is being generated"):
            forbidden()
    session.close()
    assert sessions.step() == []
