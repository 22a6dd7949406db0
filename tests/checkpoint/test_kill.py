"""A writer is killed at random moments; the newest checkpoint loads always and is complete."""

import itertools
import multiprocessing
import random
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from rlinf.checkpoint.store import CheckpointStore

KILLS = 40


def commit_without_end(directory: Path, started: Event) -> None:
    store = CheckpointStore(directory)
    start = store.load().step if store.steps() else 0
    started.set()
    for step in itertools.count(start + 1):
        tree = {"step": step, "weights": {str(i): torch.full((500,), step) for i in range(20)}}
        options = {"metric": -abs(step % 7 - 3), "meta": {"step": step}}
        store.save(step, tree, **options)
        if step % 3 == 0:
            store.save(step, tree, **options)


def commit_seconds(directory: Path) -> float:
    """Time of the second of two commits: on a busy machine the child gets no further in 50 ms."""
    with CheckpointStore(directory) as store:
        for step in (1, 2):
            begun = time.perf_counter()
            store.save(step, {"weights": torch.zeros(10_000)}, blocking=True)
    return time.perf_counter() - begun


def test_kill_at_random_moments(tmp_path):
    longest = max(0.05, 3 * commit_seconds(tmp_path / "timed"))
    tmp_path /= "run"
    # A fork server imports torch once; each child is then up in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlinf.checkpoint.store"])
    moment = random.Random(0)
    newest, interrupted = 0, 0
    for _ in range(KILLS):
        started = context.Event()
        child = context.Process(target=commit_without_end, args=(tmp_path, started))
        child.start()
        assert started.wait(60)
        time.sleep(moment.uniform(0.0, longest))
        child.kill()
        child.join()
        interrupted += any(tmp_path.glob(".*"))
        store = CheckpointStore(tmp_path)
        assert not list(tmp_path.glob(".*"))
        if not store.steps():
            continue
        found = store.load()
        assert found.refused == ()
        assert found.step >= newest
        newest = found.step
        assert found.tree["step"] == found.meta["step"] == newest
        weights = found.tree["weights"].values()
        assert all(torch.equal(w, torch.full((500,), newest)) for w in weights)
    assert newest > 0
    assert interrupted > 0
