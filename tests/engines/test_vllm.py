"""vLLM, where it is installed: conformance, and what its log-probs cannot express."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.engines.config import VLLMEngineConfig
from rlinf.engines.conformance import check_engine
from rlinf.engines.conformance_subject import open_subject, prompt
from rlinf.engines.protocol import ModelSource
from rlinf.errors import ConfigError

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("config", [{}, {"log_probs": "raw"}])
def test_it_conforms(config: dict[str, Any]) -> None:
    results = check_engine(VLLMEngineConfig(**config))
    failed = {result.name: result.detail for result in results if not result.passed}
    if config:
        # The check of updates samples at temperature 0.8, which raw log-probs do not know.
        assert all("raw log-probs" in detail for detail in failed.values())
        assert {name.split(",")[0] for name in failed} == {"log-probs after updates"}
    else:
        assert failed == {}


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
