"""A whole reasoning run whose completions vLLM generates, where it is installed."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.reasoning_config import ReasoningConfig
from rlinf.runners.run import Run

from .reasoning_support import SMALL, untimed, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HF = "{type: hf, deterministic: true, block_size: 4}"
VLLM = "type: vllm, max_running_requests: 32, max_model_len: 48"
OVERRIDES = [
    "model.architecture={hidden_size: 64}",  # its kernels know heads of 32 numbers and more
    "actor.n_minibatches=1",
    "runner.total_steps=3",
]


WITH_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.mark.parametrize(
    ("runtime", "residency", "asynchronous"),
    [
        ("local", "resident", False),
        ("local", "offload", False),
        pytest.param("ray", "resident", False, marks=WITH_RAY),
        ("local", "resident", True),
        ("local", "offload", True),
        pytest.param("ray", "resident", True, marks=WITH_RAY),
    ],
)
def test_a_run_with_vllm(tmp_path: Path, runtime: str, residency: str, asynchronous: bool) -> None:
    path = tmp_path / "small.yaml"
    engine = f"{{{VLLM}, asynchronous: {str(asynchronous).lower()}}}"
    path.write_text(SMALL.replace(HF, engine))
    cluster = [f"cluster.runtime={runtime}", f"cluster.residency={{'rollout,actor': {residency}}}"]
    recipe = load_recipe(str(path), [*OVERRIDES, *cluster])
    config = validate(ReasoningConfig, recipe.data, recipe)
    with RunDirectory.create(tmp_path, "small", path=tmp_path / "run") as run:
        Run(Reasoning, config, run, threading.Event()).run()
    lines = [line for line in untimed(run.path) if "actor/optimizer_steps" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # The first update compares the log-probs of engine and trainer: weights of each step arrived.
    assert all(line["actor/optimizer_steps"] == 1 for line in lines)
    assert all(line["rollout/staleness"] == 0 for line in lines)
    assert all(np.isfinite(value).all() for value in weights(run.path).values())
