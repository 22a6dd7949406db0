"""vLLM, where it is installed: conformance, and what its log-probs cannot express."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.engines.config import SamplingConfig, VLLMEngineConfig
from rlinf.engines.conformance_subject import Subject, open_subject, prompt
from rlinf.engines.engine_conformance import check_engine
from rlinf.engines.protocol import ModelSource
from rlinf.engines.vllm.asynchronous import AsyncVLLMEngine
from rlinf.errors import ConfigError, RunFailure

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"log_probs": "raw"},
        {"process": {}},
        {"asynchronous": True},
        {"asynchronous": True, "process": {}},
    ],
)
def test_it_conforms(config: dict[str, Any]) -> None:
    results = check_engine(VLLMEngineConfig(**config))
    failed = {result.name: result.detail for result in results if not result.passed}
    if "log_probs" in config:
        # The check of updates samples at temperature 0.8, which raw log-probs do not know.
        assert all("raw log-probs" in detail for detail in failed.values())
        assert {name.split(",")[0] for name in failed} == {"log-probs after updates"}
    else:
        assert failed == {}


def grown(subject: Subject, over: dict[int, int]) -> bool:
    return any(length > over.get(n, 0) for n, length in subject.engine.progress().items())


def wait_until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_background_goes_on_while_the_caller_sleeps() -> None:
    with open_subject(VLLMEngineConfig(asynchronous=True), "tied") as subject:
        engine = subject.engine
        asked = subject.requests(6, max_new_tokens=900)
        subject.begin(asked)
        before = engine.progress()
        wait_until(lambda: min(engine.progress().values()) == 900)
        assert min(before.values()) < 900
        # Everything ended without a step; nothing is returned without one.
        assert engine.unfinished == 6
        finished = subject.run_out()
        assert subject.error(asked, finished) < 1e-5
        assert {item.completion.stop_reason for item in finished} == {"length"}


def test_what_ended_in_the_background_keeps_its_reason_in_an_abort() -> None:
    with open_subject(VLLMEngineConfig(asynchronous=True), "tied") as subject:
        engine = subject.engine
        short, long = subject.requests(2, max_new_tokens=900)
        short = replace(short, sampling=SamplingConfig(stop_token_ids=(), max_new_tokens=4))
        engine.submit(short)
        engine.submit(long)
        wait_until(lambda: engine.progress()[short.request_id] == 4)
        time.sleep(0.1)
        found = {item.request_id: item.completion for item in engine.abort()}
        assert (len(found[short.request_id]), found[short.request_id].stop_reason) == (4, "length")
        assert found[long.request_id].stop_reason == "abort"
        assert engine.unfinished == 0
        # The same numbers again: nothing of the former requests is left.
        asked = [short, long]
        assert subject.error(asked, engine.generate(asked)) < 1e-5


def test_versions_are_exact_wherever_tokens_are_at_an_update() -> None:
    """Many updates in a row, the caller never stepping: each token is of the weights it names."""
    with open_subject(VLLMEngineConfig(asynchronous=True), "tied") as subject:
        engine, asked = subject.engine, subject.requests(6, max_new_tokens=900)
        subject.begin(asked)
        models = [copy.deepcopy(subject.model)]
        for _ in range(5):
            before = engine.progress()
            wait_until(lambda told=before: grown(subject, told))
            subject.update()
            models.append(copy.deepcopy(subject.model))
        finished = subject.run_out()
    versions = [item.completion.versions for item in finished]
    assert len({int(version) for of_one in versions for version in of_one}) >= 4
    by_id = {request.request_id: request for request in asked}
    for item in finished:
        found = item.completion
        scores = np.stack([subject.scores(by_id[item.request_id], found.tokens, m) for m in models])
        expected = scores[found.versions, np.arange(len(found))]
        assert np.abs(expected - found.log_probs).max() < 1e-5
        # Stamped one version off, at least one token near a border would differ.
        for border in np.flatnonzero(np.diff(found.versions)):
            assert (
                abs(scores[found.versions[border], border + 1] - found.log_probs[border + 1]) > 1e-5
            )


@pytest.mark.parametrize("running", [True, False])
def test_a_dead_engine_core_is_an_error(running: bool) -> None:
    with open_subject(VLLMEngineConfig(asynchronous=True), "tied") as subject:
        engine = subject.engine
        assert isinstance(engine, AsyncVLLMEngine)
        (core,) = engine.processes
        if running:
            subject.begin(subject.requests(3, max_new_tokens=900))
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{core}").exists() or zombie(core))
        told = rf"engine core .* {core} .*`process: true`"
        if running:
            with pytest.raises(RunFailure, match=told):
                subject.run_out()
        with pytest.raises(RunFailure, match=told):
            subject.update()
        with pytest.raises(RunFailure, match=told):
            engine.submit(subject.request(prompt(5, 0)))


def zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_engine_core_ends_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    code = """
import os
from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.conformance_subject import open_subject

if __name__ == "__main__":
    with open_subject(VLLMEngineConfig(asynchronous=True), "tied") as subject:
        subject.begin(subject.requests(2, max_new_tokens=900))
        (core,) = subject.engine.processes
        print("core", core, flush=True)
        os.kill(os.getpid(), 9)
"""
    script = tmp_path / "killed.py"
    script.write_text(code)
    found = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=600
    )
    assert "core " in found.stdout, found.stderr[-3000:]
    core = int(found.stdout.split()[-1])
    wait_until(lambda: not Path(f"/proc/{core}").exists() or zombie(core))


def test_raw_log_probs_allow_filters_at_temperature_1() -> None:
    with open_subject(VLLMEngineConfig(log_probs="raw"), "tied") as subject:
        asked = subject.requests(6, top_k=12, top_p=0.8, repetition_penalty=1.3, min_new_tokens=5,
                                 stop_token_ids=tuple(range(10)))  # fmt: skip
        finished = subject.engine.generate(asked)
        assert subject.error(asked, finished) < 1e-5
        assert min(len(item.completion) for item in finished) >= 5
        with pytest.raises(ConfigError, match="raw log-probs"):
            subject.engine.submit(subject.request(np.arange(4), temperature=0.7))


def test_more_prompt_tokens_than_a_pass_takes() -> None:
    config = VLLMEngineConfig(max_num_batched_tokens=600, enable_prefix_caching=False)
    with open_subject(config, "tied") as subject:
        asked = [
            subject.request(prompt(400, number), seed=number, max_new_tokens=8)
            for number in range(6)
        ]
        assert subject.error(asked, subject.engine.generate(asked)) < 1e-5


def test_heads_without_a_kernel_are_refused_at_once(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels of CUDA take all sizes")
    config = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"attention heads of 16 numbers .* 32, 64"):
        VLLMEngineConfig().build(ModelSource(path=str(tmp_path)))


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("refused on a CPU only")
    config = {"vocab_size": 32, "hidden_size": 64, "num_attention_heads": 2, "kv_lora_rank": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"latent attention .* use the engine `hf`"):
        VLLMEngineConfig().build(ModelSource(path=str(tmp_path)))


def test_building_one_leaves_the_random_state_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    with open_subject(VLLMEngineConfig(), "untied"):
        pass
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_two_workers_share_the_layers(tmp_path: Path) -> None:
    """In a process of its own: a worker's binding of threads cannot be undone."""
    code = """
from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.conformance_subject import open_subject, prompt

if __name__ == "__main__":
    with open_subject(VLLMEngineConfig(tensor_parallel_size=2), "tied") as subject:
        for _ in range(2):
            asked = subject.requests(4)
            error = subject.error(asked, subject.engine.generate(asked))
            assert error < 1e-5, error
            subject.update()
    print("done")
"""
    script = tmp_path / "two.py"
    script.write_text(code)
    settings = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    found = subprocess.run(
        [sys.executable, script],
        check=False,
        env=settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "done" in found.stdout, found.stderr[-3000:]
