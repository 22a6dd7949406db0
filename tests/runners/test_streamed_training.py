"""The actor trains on the first positions while the last ones are still being generated."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf.workers.generation import GenerationWorker
from rlinf.workers.language_actor import LanguageActorWorker

from .reasoning_support import assert_equal_runs, train, untimed, weights
from .test_reasoning import needs_two_cores
from .test_staleness import placed

IN_ORDER = (
    "actor={type: fsdp, n_minibatches: 2, shuffle: false, optim: {lr: 1.0e-3}}",
    "rollout.engine={type: hf, deterministic: true, block_size: 4, max_running_requests: 4}",
    "runner.total_steps=2",
)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("streamed"), *IN_ORDER)


def test_whole_rollouts_give_the_same_weights(
    streamed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageActorWorker, "_trains_parts", False)
    whole = train(tmp_path, *IN_ORDER)
    before, after = weights(streamed), weights(whole)
    for name, value in before.items():
        assert np.array_equal(value, after[name]), name
    for one, other in zip(untimed(streamed), untimed(whole), strict=True):
        # Sums over batches that are padded to another length round differently.
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


@needs_two_cores
def test_updates_begin_before_the_rollout_has_ended(
    streamed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    updating = threading.Event()
    fill, prepare = GenerationWorker.generate, LanguageActorWorker._prepare

    def filled(self, *arguments, **more):
        """The last group is held back until training has begun, or it is clear that it will not."""
        updating.clear()
        stage, left = fill(self, *arguments, **more), {0, 1, 2, 3}
        while True:
            try:
                emitted = next(stage)
            except StopIteration as stop:
                happened.append("rollout")
                return stop.value
            if emitted.edge == "groups":
                left.discard(emitted.source)
                if not left:
                    updating.wait(60)
            yield emitted

    def prepared(self, batch):
        happened.append(f"{len(batch)} sequences")
        updating.set()
        return prepare(self, batch)

    monkeypatch.setattr(GenerationWorker, "generate", filled)
    monkeypatch.setattr(LanguageActorWorker, "_prepare", prepared)
    run = train(tmp_path, *IN_ORDER, *placed("disaggregated"))
    for step in (happened[:4], happened[4:]):
        assert step[0] == "8 sequences", "the first update does not wait for the last group"
        assert sorted(step) == ["16 sequences", "8 sequences", "8 sequences", "rollout"]
    assert_equal_runs(streamed, run)
