"""An engine whose answers are whole conversations: turns of the model, and replies of its tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from rlinf.agents.tool_use import ToolReplies, ToolUse
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    KeptCache,
    Weights,
)
from rlinf.engines.sessions import Session, Sessions

_PAUSE = 0.05  # s, after which who submits requests gets to do something else


class Conversations(Engine):
    """Answers requests in turns on another engine.

    To whoever submits requests it is an engine like any other: a completion has the tokens of all
    turns with the replies between them, which its mask leaves out; an interrupted one is continued
    where it was, by this or another worker.

    Args:
        engine: What generates the turns; closed with this one.
        use: What follows a turn.
        max_turns: Turns of an answer.
        max_turn_tokens: Tokens of a turn; None: only the whole answer is bounded.
    """

    def __init__(
        self, engine: Engine, use: ToolUse, *, max_turns: int, max_turn_tokens: int | None = None
    ) -> None:
        self._engine, self._use = engine, use
        self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens
        self._sessions = Sessions(engine)
        self._requests: dict[int, GenerationRequest] = {}
        self._asked: dict[int, tuple[Session, ToolReplies]] = {}
        self.continues_exactly = engine.continues_exactly
        self.carries_caches = engine.carries_caches
        self.keeps_stale_caches = engine.keeps_stale_caches
        self.generates_between_steps = engine.generates_between_steps
        self._note()

    def _note(self) -> None:
        self.version, self.restarts = self._engine.version, self._engine.restarts

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and neither returned nor aborted."""
        return len(self._requests)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see :meth:`Engine.submit`."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is unfinished")
        session = self._sessions.open(
            request.prompt_tokens,
            seed=request.seed,
            number=request.request_id,
            begun=request.partial,
            cache=request.cache,
        )
        self._go_on(session, request)
        self._requests[request.request_id] = request

    def step(self) -> list[FinishedCompletion]:
        """One step of the engine; tools reply to the turns that ended by it, or by former ones."""
        finished = []
        if len(self._asked) < len(self._requests):
            for session in self._sessions.step():
                reply = self._reply(session)
                if reply is None:
                    finished.append(self._over(session))
                else:
                    self._asked[session.number] = session, reply
        else:  # a short while for the first of the tools
            missing = [future for _, reply in self._asked.values() for future in reply.missing]
            wait(missing, _PAUSE, FIRST_COMPLETED)
        for session, reply in list(self._asked.values()):
            if reply.missing:
                continue
            self._take(session, reply)
            if session.completion.stop_reason == "abort":
                self._go_on(session, self._requests[session.number])
            else:
                finished.append(self._over(session))
        self._note()
        return finished

    def progress(self) -> Mapping[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        waiting = {number: len(session.completion) for number, (session, _) in self._asked.items()}
        return {**self._engine.progress(), **waiting}

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        waiting = self._waiting if request_ids is None else self._waiting & {*request_ids}
        if request_ids is not None:
            request_ids = [number for number in request_ids if number not in waiting]
        ended = [self._interrupted(session) for session in self._sessions.abort(request_ids)]
        return ended + self._replied(waiting)

    def interrupt(self) -> list[FinishedCompletion]:
        """End all requests, with what was computed of them; see :meth:`Engine.interrupt`."""
        waiting = self._waiting
        ended = [self._interrupted(*found) for found in self._sessions.interrupt()]
        return ended + self._replied(waiting)

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace the weights; see :meth:`Engine.update_weights`."""
        self._engine.update_weights(weights, version)
        self._note()

    def adopt_weights(self, weights: Weights, version: int) -> None:
        """Compute with these tensors; see :meth:`Engine.adopt_weights`."""
        self._engine.adopt_weights(weights, version)
        self._note()

    def release_memory(self) -> None:
        """Give memory back; see :meth:`Engine.release_memory`."""
        self._engine.release_memory()

    def restore_memory(self) -> None:
        """Take the memory again; see :meth:`Engine.restore_memory`."""
        self._engine.restore_memory()

    def close(self) -> None:
        """Give everything back."""
        self._requests.clear()
        self._asked.clear()
        self._use.close()
        self._engine.close()

    def _go_on(self, session: Session, request: GenerationRequest) -> None:
        sampling = request.sampling
        if self._use.stop:
            stop = (*sampling.stop, *self._use.stop)
            sampling = sampling.model_copy(update={"stop": stop})
        begun = session.completion
        said = len(begun) - begun.turn_start
        most = self._max_turn_tokens
        session.generate(
            sampling,
            turn_ends=(*request.turn_ends, *self._use.turn_ends),
            max_turn_tokens=None if most is None else most - said,
            scored=request.scored,
        )

    def _reply(self, session: Session) -> ToolReplies | None:
        """What tools reply to a turn that ended; None where it called none, or was the last."""
        turns = session.completion
        if turns.stop_reason != "stop":
            return None
        turn = turns.tokens[turns.turn_start :]
        calls = self._use.calls(turn)
        if calls and turns.turns == self._max_turns:
            session.completion = turns.ended("length")
            return None
        return self._use.reply(turn, calls) if calls else None

    def _take(self, session: Session, reply: ToolReplies) -> None:
        """Put a reply behind a conversation, which then is to be continued, or has no room left."""
        self._asked.pop(session.number, None)
        turns, tokens = session.completion, reply.tokens()
        left = self._requests[session.number].sampling.max_new_tokens - len(turns)
        if len(tokens) >= left:
            session.completion = turns.ended("length")
        else:
            session.completion = turns.followed_by(tokens)

    @property
    def _waiting(self) -> set[int]:
        """Numbers of the conversations that wait for a tool."""
        return set(self._asked)

    def _replied(self, numbers: set[int]) -> list[FinishedCompletion]:
        """End conversations once their tools have replied."""
        found = [self._asked[number] for number in sorted(numbers)]
        for session, reply in found:
            self._take(session, reply)
        return [self._over(session) for session, _ in found]

    def _interrupted(self, session: Session, cache: KeptCache | None = None) -> FinishedCompletion:
        # Of an engine that generates between the steps, a turn may just have ended.
        reply = self._reply(session)
        if reply is not None:
            self._take(session, reply)
        return self._over(session, cache)

    def _over(self, session: Session, cache: KeptCache | None = None) -> FinishedCompletion:
        del self._requests[session.number]
        session.close()
        return FinishedCompletion(
            request_id=session.number, completion=session.completion, cache=cache
        )
