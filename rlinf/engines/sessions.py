"""Sessions: whatever wants tokens opens one on an engine, and takes turns with the model.

A session is a growing text. :meth:`Session.extend` puts given tokens behind it (a prompt, what a
tool replied), :meth:`Session.generate` lets the model go on. What was sampled stays as the tokens
that were sampled and is never tokenised again. Many sessions are in flight at once, in the
engine's continuous batch::

    sessions = Sessions(engine)
    chat = sessions.open(seed=7)
    chat.extend(prompt)
    chat.generate(SamplingConfig(max_new_tokens=100), turn_ends=(end_of_call,))
    turn = chat.wait()

A turn is a request that continues the text, so every engine can serve sessions. What the engine
computed of a text is kept between its turns where the engine gives it along (``hf`` on the CPU), so
that no turn reads the ones before it again; vLLM finds them by its prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlinf.data.sequences import Completion, StopReason
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import Engine, FinishedCompletion, GenerationRequest, KeptCache


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model said in one turn: m tokens.

    It ended by ``stop``: an end token, stop text or end of a turn; ``length``: a token limit;
    ``abort``: interrupted, and to be generated further.
    """

    tokens: np.ndarray  # [m] int64
    log_probs: np.ndarray  # [m] float32 under the distribution that each was sampled from
    versions: np.ndarray  # [m] int64, of the weights that sampled each
    stop_reason: StopReason


class Session:
    """One text that grows by given and by sampled tokens; made by :meth:`Sessions.open`."""

    def __init__(
        self, sessions: Sessions, number: int, prompt: np.ndarray, completion: Completion
    ) -> None:
        self._sessions, self.number = sessions, number
        self.prompt_tokens = prompt.astype(np.int64)
        self.completion = completion

    @property
    def running(self) -> bool:
        """Whether a turn is being generated."""
        return self._sessions.runs(self.number)

    @property
    def turn(self) -> Turn:
        """The last turn; empty, with the reason ``abort``, where nothing was sampled yet."""
        found = self.completion
        last = slice(found.turn_start, None)
        return Turn(
            tokens=found.tokens[last],
            log_probs=found.log_probs[last],
            versions=found.versions[last],
            stop_reason=found.stop_reason,
        )

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Put given tokens behind the text; before the first sampled one they are the prompt."""
        self._require_rest()
        given = np.asarray(tokens, np.int64)
        if not len(self.completion):
            self.prompt_tokens = np.concatenate([self.prompt_tokens, given])
        elif len(given):
            self.completion = self.completion.followed_by(given)

    def generate(
        self,
        sampling: SamplingConfig,
        *,
        turn_ends: tuple[int, ...] = (),
        max_turn_tokens: int | None = None,
        scored: bool = True,
    ) -> None:
        """Let the model go on; :meth:`Sessions.step` or :meth:`wait` bring the turn to its end.

        Args:
            sampling: How tokens are drawn. Its ``max_new_tokens`` and ``min_new_tokens`` count all
                tokens behind the prompt, those of former turns and given ones too.
            turn_ends: Tokens that end the turn besides the stop tokens of ``sampling``.
            max_turn_tokens: Most tokens of this turn; None: only the whole is bounded.
            scored: Whether its log-probs are used.

        Raises:
            ConfigError: The engine or model cannot serve it.
            RuntimeError: A turn is being generated.
            ValueError: There is no prompt, or no token left of ``max_new_tokens``.
        """
        self._require_rest()
        if max_turn_tokens is not None:
            longest = min(sampling.max_new_tokens, len(self.completion) + max_turn_tokens)
            shortest = min(sampling.min_new_tokens, longest)
            limits = {"max_new_tokens": longest, "min_new_tokens": shortest}
            sampling = sampling.model_copy(update=limits)
        self._sessions.begin_turn(self, sampling, turn_ends, scored)

    def wait(self) -> Turn:
        """Step the engine until the turn has ended; other sessions go on meanwhile."""
        while self.running:
            self._sessions.step()
        if not len(self.completion):
            raise RuntimeError("no turn was generated")
        return self.turn

    def close(self) -> None:
        """End the session: a turn that is being generated is lost, what was kept is dropped."""
        self._sessions.close(self)

    def _require_rest(self) -> None:
        if self.running:
            raise RuntimeError(f"a turn of session {self.number} is being generated")


class Sessions:
    """The sessions of one engine; all requests of the engine are theirs.

    Args:
        engine: What generates. Its weights may be replaced between two steps.
        cache_bytes: Most memory for what is kept of sessions that are between two turns; those
            that rested longest are read again where it does not suffice.
    """

    def __init__(self, engine: Engine, *, cache_bytes: int = 1 << 30) -> None:
        self._engine = engine
        self._bound = cache_bytes
        self._running: dict[int, Session] = {}
        self._caches: OrderedDict[int, KeptCache] = OrderedDict()
        self._opened = 0

    def open(
        self,
        prompt_tokens: Sequence[int] | np.ndarray = (),
        *,
        seed: int,
        number: int | None = None,
        begun: Completion | None = None,
        cache: KeptCache | None = None,
    ) -> Session:
        """A new session, of which nothing is generated yet.

        Args:
            prompt_tokens: [P] tokens that it begins with.
            seed: Of its sampling; a turn goes on with the random numbers where the last one ended.
            number: Its number on the engine; None: the next one that was not given out.
            begun: What an earlier session had, to go on with it.
            cache: What the engine gave with ``begun``.
        """
        if number is None:
            number = self._opened
        self._opened = max(self._opened, number + 1)
        none = np.zeros(0, np.int64)
        empty = Completion(
            tokens=none,
            log_probs=none.astype(np.float32),
            versions=none,
            stop_reason="abort",
            seed=seed,
        )
        session = Session(self, number, np.asarray(prompt_tokens, np.int64), begun or empty)
        if cache is not None:
            self._keep(number, cache)
        return session

    @property
    def kept_bytes(self) -> int:
        """Memory of what is kept of sessions between two turns."""
        return sum(cache.numbers.nbytes for cache in self._caches.values())

    def runs(self, number: int) -> bool:
        """Whether a turn of this session is being generated."""
        return number in self._running

    def begin_turn(
        self, session: Session, sampling: SamplingConfig, turn_ends: tuple[int, ...], scored: bool
    ) -> None:
        """Submit the next turn; see :meth:`Session.generate`."""
        begun, cache = session.completion, self._caches.pop(session.number, None)
        if cache is not None:
            behind = len(session.prompt_tokens) + len(begun) - cache.tokens
            # Tokens behind a cache go in one at a time: more of them are better read at once.
            if behind > cache.tokens:
                cache = None
        self._engine.submit(
            GenerationRequest(
                request_id=session.number,
                prompt_tokens=session.prompt_tokens,
                seed=begun.seed,
                sampling=sampling,
                partial=begun if len(begun) else None,
                cache=cache,
                turn_ends=turn_ends,
                keep_cache=self._engine.carries_caches and self._bound > 0,
                scored=scored,
            )
        )
        self._running[session.number] = session

    def step(self) -> list[Session]:
        """One step of the engine; returns the sessions whose turns ended by it."""
        return self._taken(self._engine.step())

    def abort(self, numbers: Sequence[int] | None = None) -> list[Session]:
        """End turns now; they can be generated further. None: all; returns whose."""
        return self._taken(self._engine.abort(numbers))

    def interrupt(self) -> list[tuple[Session, KeptCache | None]]:
        """End all turns, to go on in another engine of the same weights, with what was computed."""
        ended = self._taken(self._engine.interrupt())
        return [(session, self._caches.pop(session.number, None)) for session in ended]

    def close(self, session: Session) -> None:
        """Forget a session; see :meth:`Session.close`."""
        if session.running:
            self._engine.abort([session.number])
            del self._running[session.number]
        self._caches.pop(session.number, None)

    def _taken(self, finished: Sequence[FinishedCompletion]) -> list[Session]:
        ended = []
        for item in finished:
            session = self._running.pop(item.request_id)
            session.completion = item.completion
            if item.cache is not None:
                self._keep(session.number, item.cache)
            ended.append(session)
        return ended

    def _keep(self, number: int, cache: KeptCache) -> None:
        self._caches[number] = cache
        while self.kept_bytes > self._bound:
            self._caches.popitem(last=False)
