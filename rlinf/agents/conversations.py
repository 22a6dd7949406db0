"""An engine whose answers are whole conversations: turns of the model, and replies of its tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf.agents.tool_use import ToolUse
from rlinf.data.sequences import Completion
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    KeptCache,
    Weights,
)
from rlinf.engines.sessions import Session, Sessions


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
        """One step of the engine; tools reply to the turns that ended by it."""
        finished = []
        for session in self._sessions.step():
            request = self._requests[session.number]
            answer = self._answered(session.completion, request)
            if answer.stop_reason == "abort":
                session.completion = answer
                self._go_on(session, request)
            else:
                finished.append(self._over(session, answer))
        self._note()
        return finished

    def progress(self) -> Mapping[int, int]:
        """Tokens so far; see :meth:`Engine.progress`."""
        return self._engine.progress()

    def abort(self, request_ids: Sequence[int] | None = None) -> list[FinishedCompletion]:
        """End requests now; see :meth:`Engine.abort`."""
        return [self._interrupted(session) for session in self._sessions.abort(request_ids)]

    def interrupt(self) -> list[FinishedCompletion]:
        """End all requests, with what was computed of them; see :meth:`Engine.interrupt`."""
        return [self._interrupted(*found) for found in self._sessions.interrupt()]

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
        )

    def _answered(self, turns: Completion, request: GenerationRequest) -> Completion:
        """A conversation after a turn that ended: over, or with a reply and to be continued."""
        if turns.stop_reason != "stop":
            return turns
        reply = self._use.reply(turns.tokens[turns.turn_start :])
        if reply is None:
            return turns
        left = request.sampling.max_new_tokens - len(turns)
        if turns.turns == self._max_turns or len(reply) >= left:
            return turns.ended("length")
        return turns.followed_by(reply)

    def _interrupted(self, session: Session, cache: KeptCache | None = None) -> FinishedCompletion:
        request = self._requests[session.number]
        # Of an engine that generates between the steps, a turn may just have ended.
        return self._over(session, self._answered(session.completion, request), cache)

    def _over(
        self, session: Session, answer: Completion, cache: KeptCache | None = None
    ) -> FinishedCompletion:
        del self._requests[session.number]
        session.close()
        return FinishedCompletion(request_id=session.number, completion=answer, cache=cache)
