"""Workers of a reasoning run that break in their third step."""

from __future__ import annotations

from rlinf.workers.generation import GenerationWorker
from rlinf.workers.language_actor import LanguageActorWorker


class FailingGeneration(GenerationWorker):
    """Generates two steps."""

    def generate(self, scored, *, step, **arguments):
        if step == 2:
            raise ArithmeticError("the rollout broke")
        return (yield from super().generate(scored, step=step, **arguments))


class FailingActor(LanguageActorWorker):
    """Trains on two steps."""

    def train(self, groups, *, step):
        if step == 2:
            raise ArithmeticError("the actor broke")
        return (yield from super().train(groups, step=step))
