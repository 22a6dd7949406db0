"""A whole reasoning run whose completions vLLM generates, where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from .reasoning_support import train, untimed, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VLLM = (
    "rollout.engine={type: vllm, max_running_requests: 32, max_model_len: 48}",
    "actor.n_minibatches=1",
    "runner.total_steps=3",
)


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_with_vllm(tmp_path: Path, runtime: str) -> None:
    run = train(tmp_path, *VLLM, f"cluster.runtime={runtime}")
    lines = [line for line in untimed(run) if "actor/optimizer_steps" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # The first update compares the log-probs of engine and trainer: weights of each step arrived.
    assert all(line["actor/optimizer_steps"] == 1 for line in lines)
    assert all(line["actor/refused_updates"] == 0 for line in lines)
    assert all(line["rollout/staleness"] == 0 for line in lines)
    assert all(np.isfinite(value).all() for value in weights(run).values())
