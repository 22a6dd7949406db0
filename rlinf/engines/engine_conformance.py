"""What every engine must do, as checks that a user can run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rlinf.conformance import CheckResult, NotMetError, outcome, require
from rlinf.data.pictures import Picture
from rlinf.engines.config import EngineConfig, SamplingConfig
from rlinf.engines.conformance_subject import (
    CONTEXT,
    END,
    KINDS,
    LETTERS,
    VOCABULARY,
    Kind,
    Subject,
    open_subject,
    prompt,
    require_small,
)
from rlinf.engines.sessions import Sessions
from rlinf.errors import ConfigError, RLinfError

_UPDATES = 5
_PAUSE = 0.05  # seconds between two looks at what should not change, or should
_PATIENCE = 60.0  # seconds after which it is said not to change
_SEEN = 1e-3  # log-probs differ by more where another picture was looked at
_FAILURES = (RLinfError, RuntimeError, ValueError)


def check_engine(config: EngineConfig) -> list[CheckResult]:
    """Run the conformance suite on the engine of ``config``, with tiny float32 models.

    Works for every engine, also one of another package; builds it once for each of them. The
    reference is a full forward pass of transformers, without any cache.
    """
    config.check()
    results = []
    for kind in KINDS:
        if kind == "pictures" and not config.reads_pictures:
            continue
        with open_subject(config, kind) as subject:
            for name, kinds, check in CHECKS:
                if kind in kinds:
                    shown = name if len(kinds) == 1 else f"{name}, {kind}"
                    results.append(outcome(shown, check, subject, _FAILURES))
                    subject.engine.abort()
    return results


def _nothing_to_do(subject: Subject) -> str:
    engine = subject.engine
    require(engine.step() == [], "a step without requests returned something")
    require(engine.abort() == [], "there was something to abort")
    require(engine.unfinished == 0, f"{engine.unfinished} requests are unfinished")
    require(engine.version == 0, f"the first version is {engine.version}, not 0")
    return "a step without requests returns nothing"


def _updates(subject: Subject) -> str:
    errors = []
    for number in range(_UPDATES + 1):
        if number:
            subject.update()
        requests = subject.requests(7, temperature=0.8)
        finished = subject.engine.generate(requests)
        errors.append(subject.require_scores(requests, finished, f"after {number} updates"))
        versions = {int(v) for item in finished for v in item.completion.versions}
        expected = {subject.engine.version}
        require(versions == expected, f"tokens carry the versions {versions}, not {expected}")
    return f"within {max(errors):.1e} of a full forward, before and after {_UPDATES} updates"


def _prefixes(subject: Subject) -> str:
    # Longer than the blocks in which engines keep prefixes.
    text = prompt(300, 1)
    for number in range(3):
        request = subject.request(text, seed=number, max_new_tokens=4)
        where = f"of a prompt that was known before update {number}"
        subject.require_scores([request], subject.engine.generate([request]), where)
        subject.update()
    return "a prompt that was computed under old weights is computed again"


def _update_midway(subject: Subject) -> str:
    if getattr(subject.engine, "keeps_stale_caches", False):
        return "not checked: configured to keep the caches of old weights"
    requests = subject.requests(6, max_new_tokens=subject.long)
    before = subject.engine.version
    subject.begin(requests)
    former = copy.deepcopy(subject.model)
    subject.update()
    by_id = {item.request_id: item.completion for item in subject.run_out()}
    for request in requests:
        found = by_id[request.request_id]
        require(len(found) == subject.long, f"{len(found)} of {subject.long} tokens")
        require((np.diff(found.versions) >= 0).all(), f"versions {found.versions.tolist()}")
        kinds = set(found.versions.tolist())
        require(kinds == {before, before + 1}, f"an interrupted sequence has versions {kinds}")
        now, then = (subject.scores(request, found.tokens, m) for m in (subject.model, former))
        expected = np.where(found.versions > before, now, then)
        error = float(np.abs(expected - found.log_probs).max())
        require_small(error, "under the weights of each token's version")
    return "running sequences go on, each token scored under the weights of its version"


def _abort(subject: Subject) -> str:
    engine = subject.engine
    requests = subject.requests(6, max_new_tokens=subject.long)
    uninterrupted = [item.completion.tokens for item in engine.generate(requests)]
    subject.begin(requests)
    chosen = [request.request_id for request in requests[:2]]
    aborted = engine.abort([*chosen, 10**9])
    require({a.request_id for a in aborted} == set(chosen), "others were aborted than asked for")
    require(engine.unfinished == 4, f"{engine.unfinished} are unfinished after 2 of 6 aborts")
    aborted += engine.interrupt()
    require(engine.unfinished == 0, f"{engine.unfinished} are unfinished after all were aborted")
    carried = sum(item.cache is not None for item in aborted)
    wanted = 4 if engine.carries_caches else 0
    require(carried == wanted, f"{carried} of 4 interrupted sequences have caches, not {wanted}")
    reasons = {item.completion.stop_reason for item in aborted}
    require(reasons == {"abort"}, f"stop reasons {reasons}")
    begun = {item.request_id: item for item in aborted}
    shortest = min(len(item.completion) for item in aborted)
    require(shortest > 0, "a sequence had nothing after the first steps")
    again = [
        subject.request(r.prompt_tokens, pictures=r.pictures, seed=r.seed,
                        partial=begun[r.request_id].completion,
                        cache=begun[r.request_id].cache, max_new_tokens=subject.long)
        for r in requests
    ]  # fmt: skip
    finished = engine.generate(again)
    subject.require_scores(again, finished, "of what was continued")
    same = 0
    for request, item, tokens in zip(again, finished, uninterrupted, strict=True):
        part, found = request.partial, item.completion
        assert part is not None
        kept = np.array_equal(found.tokens[: len(part)], part.tokens)
        require(kept, "the tokens before the abort are lost")
        require(len(found) == subject.long, f"{len(found)} of {subject.long} tokens")
        same += np.array_equal(found.tokens, tokens)
    if engine.continues_exactly:
        require(same == 6, f"{6 - same} of 6 continued sequences differ from uninterrupted ones")
        return "what is continued is what it would have been uninterrupted"
    return "nothing before an abort is lost; what follows is drawn anew"


def _progress(subject: Subject) -> str:
    engine = subject.engine
    if engine.generates_between_steps:
        return _background_progress(subject)
    for request in subject.requests(9):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    try:
        told = dict(engine.progress())
    except ConfigError as error:
        return f"refused: {error}"
    time.sleep(_PAUSE)
    require(dict(engine.progress()) == told, "sequences grew between two steps")
    aborted = engine.abort()
    has = {item.request_id: len(item.completion) for item in aborted}
    require(told == has, f"lengths {told} were told, and {has} returned")
    part = max((item.completion for item in aborted), key=len)
    engine.submit(subject.request(prompt(5, 0), partial=part))
    (length,) = engine.progress().values()
    require(length == len(part), f"{length} tokens were told of {len(part)} given ones")
    return "what was told of unfinished sequences is what they had"


def _background_progress(subject: Subject) -> str:
    engine = subject.engine
    requests = subject.requests(6, max_new_tokens=subject.long)
    subject.begin(requests)
    told = dict(engine.progress())
    end = time.monotonic() + _PATIENCE
    while sum(engine.progress().values()) == sum(told.values()):
        require(time.monotonic() < end, f"no sequence grew in {_PATIENCE:g} s between two steps")
        time.sleep(_PAUSE)
    aborted = engine.abort()
    has = {item.request_id: len(item.completion) for item in aborted}
    require(has.keys() == told.keys(), f"{sorted(told)} were told of, and {sorted(has)} returned")
    fewer = [number for number, length in has.items() if length < told[number]]
    require(not fewer, f"lengths {told} were told, and {has} returned")
    part = min((item.completion for item in aborted), key=len)
    engine.submit(subject.request(prompt(5, 0), partial=part, max_new_tokens=subject.long))
    (length,) = engine.progress().values()
    require(length >= len(part), f"{length} tokens were told of {len(part)} given ones")
    return "sequences grow between two steps, and have what was told of them or more"


def _seeds(subject: Subject) -> str:
    text = prompt(9, 2)
    many = [subject.request(text, seed=number % 4, max_new_tokens=20) for number in range(8)]
    found = [item.completion.tokens for item in subject.engine.generate(many)]
    for one, other in zip(found[:4], found[4:], strict=True):
        require(np.array_equal(one, other), "the same seed gave two sequences")
    distinct = len({tokens.tobytes() for tokens in found})
    require(distinct == 4, f"4 seeds gave {distinct} sequences")
    return "equal seeds give equal sequences, others do not"


def _stop_tokens(subject: Subject) -> str:
    stops = tuple(range(0, VOCABULARY, 8))
    requests = subject.requests(12, max_new_tokens=6, stop_token_ids=stops)
    seen = set()
    for item in subject.engine.generate(requests):
        tokens, reason = item.completion.tokens, item.completion.stop_reason
        seen.add(reason)
        ended = bool(np.isin(tokens[-1], stops))
        require(not np.isin(tokens[:-1], stops).any(), "a sequence went on after a stop token")
        require(reason == ("stop" if ended else "length"), f"{reason}: ended by {tokens[-1]}")
        require(ended or len(tokens) == 6, f"{len(tokens)} of 6 tokens")
    return f"stop reasons {', '.join(sorted(seen))}; the stop token is the last one"


def _stop_texts(subject: Subject) -> str:
    texts = tuple(letter for letter in LETTERS[:18] if letter.isalpha())
    requests = subject.requests(9, max_new_tokens=6, stop=texts)
    reasons = []
    for item in subject.engine.generate(requests):
        letters = [(*LETTERS, "")[token] for token in item.completion.tokens]
        early = [letter for letter in letters[:-1] if letter in texts]
        require(not early, f"a sequence went on after the stop text {early}")
        reason = "stop" if letters[-1] in texts else "length"
        require(item.completion.stop_reason == reason, f"{''.join(letters)!r} is no {reason}")
        reasons.append(reason)
    _require_end_across_an_interruption(subject)
    return f"{reasons.count('stop')} of {len(reasons)} were ended by a text"


def _require_end_across_an_interruption(subject: Subject) -> None:
    """A stop text of which a continued sequence has the first letter and draws the second."""
    asked = [subject.request(prompt(5, number), greedy=True) for number in range(6)]
    texts = [found.completion for found in subject.engine.generate(asked)]
    pairs = [
        (request, text) for request, text in zip(asked, texts, strict=True)
        if (text.tokens[3:5] < END).all()
    ]  # fmt: skip
    require(bool(pairs), "no sequence has two letters where one is to be interrupted")
    for request, text in pairs:
        begun = replace(
            text, tokens=text.tokens[:4], log_probs=text.log_probs[:4],
            versions=text.versions[:4], stop_reason="abort",
        )  # fmt: skip
        stop = "".join(LETTERS[token] for token in text.tokens[3:5])
        again = subject.request(request.prompt_tokens, greedy=True, stop=(stop,), partial=begun)
        (found,) = subject.engine.generate([again])
        ended = (len(found.completion), found.completion.stop_reason)
        require(ended == (5, "stop"), f"{stop!r}, half of it given, left {ended}, not 5 tokens")


def _turns(subject: Subject) -> str:
    ends = tuple(range(0, VOCABULARY, 4))
    sessions = Sessions(subject.engine)
    sampling = SamplingConfig(max_new_tokens=40, stop_token_ids=())
    opened = [sessions.open(prompt(5 + number, number), seed=number) for number in range(8)]
    said = [np.zeros(0, np.int64) for _ in opened]
    for number in range(3):
        for session in opened:
            session.generate(sampling, turn_ends=ends, max_turn_tokens=8)
        for place, session in enumerate(opened):
            turn = session.wait()
            ended = bool(np.isin(turn.tokens[-1], ends))
            require(not np.isin(turn.tokens[:-1], ends).any(), "a turn went on after its end")
            require(ended or len(turn.tokens) == 8, f"{len(turn.tokens)} of 8 tokens")
            require(turn.stop_reason == ("stop" if ended else "length"), turn.stop_reason)
            said[place] = np.concatenate([said[place], turn.tokens])
            if number < 2:
                session.extend(prompt(3, 40 + place))
    for session, tokens in zip(opened, said, strict=True):
        found, mask = session.completion, session.completion.mask
        require(np.array_equal(found.sampled_tokens, tokens), "the turns are not what was sampled")
        scores = subject.scores(subject.request(session.prompt_tokens), found.tokens)
        error = float(np.abs(scores - found.log_probs)[mask].max())
        require_small(error, "of turns behind given tokens")
        session.close()
    return "three turns with given tokens between them, of 8 sessions at once"


def _limits(subject: Subject) -> str:
    lengths = [1, 2, 5, 30, 3, 9, 14, 4]
    requests = [
        subject.request(prompt(4 + number, number), seed=number, max_new_tokens=length)
        for number, length in enumerate(lengths)
    ]
    found = [len(item.completion) for item in subject.engine.generate(requests)]
    require(found == lengths, f"lengths {found}, expected {lengths}")
    stops = tuple(range(0, VOCABULARY, 3))
    sampling = {"min_new_tokens": 5, "max_new_tokens": 9, "stop_token_ids": stops}
    requests = subject.requests(6, **sampling)
    try:
        finished = subject.engine.generate(requests)
    except ConfigError as error:
        return f"longest lengths are kept; shortest are refused: {error}"
    shortest = min(len(item.completion) for item in finished)
    require(shortest >= 5, f"a sequence of {shortest} tokens, expected at least 5")
    subject.require_scores(requests, finished, "of sequences with a shortest length")
    return "shortest and longest lengths are kept"


def _greedy(subject: Subject) -> str:
    requests = subject.requests(4, greedy=True, max_new_tokens=8)
    finished = subject.engine.generate(requests)
    subject.require_scores(requests, finished, "of greedy sequences")
    for request, item in zip(requests, finished, strict=True):
        text = np.concatenate([request.prompt_tokens, item.completion.tokens])
        with torch.no_grad():
            logits = subject.model(torch.from_numpy(text)[None]).logits[0]
        best = logits.argmax(-1).numpy()[len(request.prompt_tokens) - 1 : -1]
        require(np.array_equal(best, item.completion.tokens), "not the most likely tokens")
    return "the most likely token each time"


def _queue(subject: Subject) -> str:
    requests = subject.requests(20, max_new_tokens=5)
    finished = subject.engine.generate(requests)
    subject.require_scores(requests, finished, "of requests that had to wait")
    try:
        subject.engine.submit(subject.request(prompt(CONTEXT - 100, 3), max_new_tokens=200))
    except ConfigError as error:
        return f"more requests than places wait; too long is refused: {error}"
    raise NotMetError("a request longer than the model's context was taken")


def _memory(subject: Subject) -> str:
    engine = subject.engine
    engine.submit(subject.request(prompt(6, 4)))
    try:
        engine.release_memory()
    except RuntimeError:
        engine.abort()
    else:
        raise NotMetError("memory was released under a running sequence")
    engine.release_memory()
    engine.restore_memory()
    subject.update()
    requests = subject.requests(4)
    where = "after memory was released and restored"
    subject.require_scores(requests, engine.generate(requests), where)
    return "released, restored and in use again"


def _wrong_weights(subject: Subject) -> str:
    weights = subject.weights()
    for title, wrong in (("missing", weights[1:]), ("unknown", [*weights, ("x", weights[0][1])])):
        try:
            subject.engine.update_weights(wrong, subject.engine.version + 1)
        except ValueError:
            continue
        raise NotMetError(f"weights with a {title} name were taken")
    requests = subject.requests(4)
    where = "after wrong weights were refused"
    subject.require_scores(requests, subject.engine.generate(requests), where)
    return "incomplete and unknown weights are refused, the old ones stay"


def _pictures(subject: Subject) -> str:
    assert subject.sight is not None, "only checked of a model that reads pictures"
    text = prompt(6, 5)
    asked = []
    for seed in (1, 2):
        tokens, pictures = subject.sight.prompt(text, seed=seed)
        asked.append(subject.request(tokens, pictures=pictures, greedy=True))
    alone = [subject.request(prompt(5 + number, number), pictures=()) for number in range(3)]
    finished = subject.engine.generate([*asked, *alone])
    subject.require_scores(asked, finished, "of equal tokens with unequal pictures")
    subject.require_scores(alone, finished, "of prompts without a picture, beside some with one")
    by_id = {item.request_id: item.completion for item in finished}
    one, other = (by_id[request.request_id].log_probs for request in asked)
    require(float(np.abs(one - other).max()) > _SEEN, "another picture changes nothing")
    return "equal tokens with another picture are another prompt, with none beside them"


def _unread_pictures(subject: Subject) -> str:
    picture = Picture(data=np.zeros(1, np.uint8), first=1, rows=1, columns=1)
    try:
        subject.engine.submit(subject.request(prompt(5, 6), pictures=(picture,)))
    except ConfigError as error:
        return f"refused by a model of text: {error}"
    raise NotMetError("a picture was taken by a model that reads text alone")


_ONE: tuple[Kind, ...] = ("tied",)
_SEEING: tuple[Kind, ...] = ("pictures",)

CHECKS: tuple[tuple[str, tuple[Kind, ...], Callable[[Subject], str]], ...] = (
    ("nothing to do", _ONE, _nothing_to_do),
    ("log-probs after updates", KINDS, _updates),
    ("prefixes of old weights", KINDS, _prefixes),
    ("update midway", KINDS, _update_midway),
    ("abort and continue", _ONE + _SEEING, _abort),
    ("progress", _ONE, _progress),
    ("seeds", _ONE, _seeds),
    ("stop tokens", _ONE, _stop_tokens),
    ("stop texts", _ONE, _stop_texts),
    ("turns", _ONE, _turns),
    ("lengths", _ONE, _limits),
    ("greedy", _ONE, _greedy),
    ("queue", _ONE, _queue),
    ("wrong weights", _ONE, _wrong_weights),
    ("unread pictures", _ONE, _unread_pictures),
    ("memory", _ONE + _SEEING, _memory),
    ("pictures", _SEEING, _pictures),
)
"""The suite: what is checked, with which models, and the function that raises when it is not
met."""
