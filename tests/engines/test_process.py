"""An engine in a process of its own: what is lost with the process is generated again."""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlinf.engines.config import HFEngineConfig
from rlinf.engines.engine_conformance import check_engine
from rlinf.engines.process.engine import ProcessEngine
from rlinf.engines.process.weight_block import WeightBlock
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest, ModelSource
from rlinf.errors import ConfigError, RunFailure

from .conftest import requests
from .failing_engine import FailingConfig

pytestmark = pytest.mark.timeout(300)

Supervised = Callable[..., ProcessEngine]
EXACT = {"deterministic": True, "block_size": 4}


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as files."""
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def supervised(directory: Path) -> Iterator[Supervised]:
    """Builds engines in processes, which are closed at the end."""
    built = []

    def build(process: Any = True, **config: Any) -> ProcessEngine:
        section = {"type": "hf", "process": process, **EXACT, **config}
        engine = HFEngineConfig.model_validate(section).build(ModelSource(path=directory))
        assert isinstance(engine, ProcessEngine)
        built.append(engine)
        return engine

    yield build
    for engine in built:
        engine.close()


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def assert_same_bits(one: list[FinishedCompletion], other: list[FinishedCompletion]) -> None:
    assert len(one) == len(other)
    first, second = ({i.request_id: i.completion for i in items} for items in (one, other))
    assert first.keys() == second.keys()
    for number, left in first.items():
        right = second[number]
        assert left.stop_reason == right.stop_reason
        for name in ("tokens", "log_probs", "versions"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), (number, name)


def run(
    engine: Any, asked: list[GenerationRequest], kill_before: tuple[int, ...] = ()
) -> list[FinishedCompletion]:
    """Generate; kill the process before some of the steps."""
    for request in asked:
        engine.submit(request)
    finished: list[FinishedCompletion] = []
    step = 0
    while engine.unfinished:
        if step in kill_before:
            os.kill(engine.pid, signal.SIGKILL)
        finished += engine.step()
        step += 1
    return finished


def changed(model: Any, factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * value for name, value in model.state_dict().items()}


def kill_the_first() -> None:
    """Kill the first engine process that is seen."""
    while True:
        for child in psutil.Process().children():
            if "rlinf.engines.process.child" in child.cmdline():
                child.kill()
                return
        time.sleep(0.005)


@pytest.mark.slow
def test_a_kill_changes_no_bit(
    supervised: Supervised, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither while the process starts nor between steps; the replacement goes on as told."""
    killer = threading.Thread(target=kill_the_first, daemon=True)
    killer.start()
    with caplog.at_level(logging.WARNING):
        engine = supervised(max_running_requests=5, dtype="bfloat16")
    killer.join(1)
    assert engine.restarts == 1
    assert "signal SIGKILL" in caplog.text
    caplog.clear()
    own = HFEngineConfig(max_running_requests=5, dtype="bfloat16", **EXACT)
    with own.build(ModelSource(module=model)) as within:
        for each in (within, engine):
            each.update_weights(changed(model, 1.1).items(), 4)
        asked = requests(14)
        expected = run(within, asked)
        with caplog.at_level(logging.WARNING):
            assert_same_bits(expected, run(engine, asked, kill_before=(9,)))
    assert engine.restarts == 2
    assert "signal SIGKILL" in caplog.text
    assert "replaced (2 of at most 3)" in caplog.text
    for request in requests(9):
        engine.submit(request)
    ended = [item.request_id for _ in range(5) for item in engine.step()]
    told = dict(engine.progress())
    assert told.keys() == set(range(9)) - set(ended)
    assert told == {item.request_id: len(item.completion) for item in engine.abort()}
    child = engine.pid
    engine.close()
    assert gone(child)
    with pytest.raises(RuntimeError, match="closed"):
        engine.pid  # noqa: B018 - the property raises


@pytest.mark.slow
def test_many_kills(supervised: Supervised, model: Any) -> None:
    """With given beginnings, with the weights of the directory, with new ones, and with newer."""
    engine = supervised(process={"max_restarts": 9})
    asked = requests(12)
    with HFEngineConfig(**EXACT).build(ModelSource(module=copy.deepcopy(model))) as within:
        for request in asked:
            within.submit(request)
        for _ in range(4):
            within.step()
        parts = {item.request_id: item.completion for item in within.abort()}
        begun = [replace(asked[n], partial=part) for n, part in sorted(parts.items())]
        assert sum(len(part) for part in parts.values()) > 20
        for version, factor in ((0, 1.0), (1, 1.2), (2, 0.8)):
            if version:
                for each in (within, engine):
                    each.update_weights(changed(model, factor).items(), version)
            before = engine.restarts
            found = run(engine, begun, kill_before=(0, 2, 3))
            assert engine.restarts == before + 3
            assert_same_bits(run(within, begun), found)


@pytest.mark.slow
def test_a_process_that_stops_is_replaced(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    engine = supervised(process={"step_deadline": 1.0})
    asked = requests(6)
    undisturbed = run(engine, asked)
    for request in asked:
        engine.submit(request)
    stopped = engine.pid
    os.kill(stopped, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        finished = engine.step()
    assert "hang: no answer within 1 s" in caplog.text
    assert gone(stopped)
    while engine.unfinished:
        finished += engine.step()
    assert_same_bits(undisturbed, finished)


@pytest.mark.slow
def test_too_many_losses_stop_the_run(supervised: Supervised) -> None:
    engine = supervised(process={"max_restarts": 1})
    for request in requests(3, longest=200, max_new_tokens=200, stop_token_ids=()):
        engine.submit(request)
    os.kill(engine.pid, signal.SIGKILL)
    engine.step()
    os.kill(engine.pid, signal.SIGSEGV)
    with pytest.raises(RunFailure, match=r"lost 2 times, and process\.max_restarts = 1") as failure:
        engine.step()
    assert "signal SIGSEGV" in str(failure.value)
    assert "Fatal Python error" in str(failure.value)
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_an_error_of_a_step_is_a_loss_and_keeps_its_stack(directory: Path) -> None:
    config = FailingConfig.model_validate({"type": "hf", "process": {"max_restarts": 0}})
    with config.build(ModelSource(path=directory)) as engine:
        (request,) = requests(1)
        engine.submit(request)
        with pytest.raises(ValueError, match="request 0 is unfinished"):
            engine.submit(request)
        with pytest.raises(RunFailure, match=r"(?s)in step.*shapes of the cache differ"):
            engine.step()
        with pytest.raises(RuntimeError, match="closed"):
            engine.step()


def test_a_process_that_cannot_be_started_is_lost(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RunFailure, match=r"lost 3 times(?s:.)*could not be started"):
        supervised(process={"max_restarts": 2})
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_conforms() -> None:
    pytest.importorskip("peft")
    results = check_engine(HFEngineConfig.model_validate({"type": "hf", "process": True}))
    assert len(results) == 31
    assert [result for result in results if not result.passed] == []


@pytest.mark.slow
def test_what_cannot_be_built_is_refused_as_in_the_own_process() -> None:
    config = HFEngineConfig.model_validate({"type": "hf", "process": True})
    with pytest.raises(ConfigError, match="a module or a directory"):
        config.build(ModelSource())


DRIVER = """
import signal, sys, time
from pathlib import Path
from rlinf.engines.config import HFEngineConfig
from rlinf.engines.protocol import ModelSource

config = HFEngineConfig.model_validate({"type": "hf", "process": True})
with config.build(ModelSource(path=Path(sys.argv[1]))) as engine:
    print(engine.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_its_driver(directory: Path, ending: signal.Signals, stopped: bool) -> None:
    """Also where it stands still and could not notice anything by itself."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    if stopped:
        os.kill(child, signal.SIGSTOP)
    driver.send_signal(ending)
    driver.wait(30)
    assert gone(child)


def test_weights_lie_aligned_and_are_seen_by_who_opened_the_block() -> None:
    given = {
        "a": torch.arange(6.0).view(2, 3),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
    }
    block = WeightBlock(given)
    seen = block.address.open()
    assert all(torch.equal(seen[name], value) for name, value in given.items())
    assert all(value.data_ptr() % 64 == 0 for value in seen.values())
    assert block.fits(dict(reversed(given.items())))
    assert not block.fits({**given, "a": given["a"].view(3, 2)})
    assert not block.fits({**given, "a": given["a"].bfloat16()})
    block.write({**given, "a": -given["a"]})
    assert torch.equal(seen["a"], -given["a"])
    block.close()
