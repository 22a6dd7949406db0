"""Whole runs on a device whose tensors refuse to mix with the host's, beside the CPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.backend_registration

from rlinf.data.demonstrations import Demonstrations
from tests.pretend import program, two_ranks
from tests.runners import reasoning_support, supervised_support, support
from tests.runners.vla_support import OFT
from tests.trainers.processes import results_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends written in Python",
)


class Pretend:
    """A process with the pretend accelerator; what it runs shares its start."""

    def __init__(self, directory: Path) -> None:
        self._errors = directory / "errors"
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", program.__name__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def run(self, kind: str, directory: Path, *overrides: str) -> str:
        """Returns what is wrong, nothing where the run ended well."""
        directory.mkdir()
        if self._process.poll() is not None:  # an earlier run failed
            self._process = self._started()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, str(directory), *overrides]) + "\n")
        self._process.stdin.flush()
        if any(line.strip() == program.DONE for line in self._process.stdout):
            return ""
        self._process.wait()
        return self._errors.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def pretend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pretend]:
    process = Pretend(tmp_path_factory.mktemp("pretend"))
    yield process
    process.close()


def run_on_both(pretend: Pretend, kind: str, directory: Path, *overrides: str) -> tuple[Path, Path]:
    cpu = directory / "cpu"
    cpu.mkdir()
    program.KINDS[kind](cpu, *overrides)
    wrong = pretend.run(kind, directory / "pretend", *overrides)
    assert not wrong, wrong
    return cpu / "run", directory / "pretend" / "run"


def assert_close(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_two_workers_may_both_send_first(pretend: Pretend, tmp_path: Path) -> None:
    assert not pretend.run("both_send_first", tmp_path / "transfer")


@pytest.mark.parametrize(
    "overrides",
    [
        ("runner.total_env_steps=256",),
        pytest.param(
            (
                "runner.total_env_steps=512",
                "algorithm.type=decoupled_ppo",
                "rollout.max_staleness=1",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ppo", "decoupled ppo, one step ahead"],
)
def test_a_policy_is_trained_as_on_the_cpu(
    pretend: Pretend, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, other = run_on_both(pretend, "embodied", tmp_path, *overrides)
    assert_close(support.metrics(cpu), support.metrics(other))


def test_transitions_of_a_replay_are_trained_on_as_on_the_cpu(
    pretend: Pretend, tmp_path: Path
) -> None:
    # What is offloaded is spoilt here: who reads it meanwhile gets NaN.
    away = "cluster.residency={actor: offload}"
    cpu, other = run_on_both(pretend, "off_policy", tmp_path, "runner.total_env_steps=384", away)
    assert_close(support.metrics(cpu), support.metrics(other))
    (tmp_path / "recorded").mkdir()
    for drawn in ("true", "false"):
        place = tmp_path / "recorded" / drawn
        place.mkdir()
        words = str(cpu), f"evaluation.deterministic={drawn}"
        one, other = map(Demonstrations.load, run_on_both(pretend, "recording", place, *words))
        np.testing.assert_allclose(one.actions, other.actions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("cloning", ()),
        pytest.param("cloning", ("objective=squared_error",), marks=pytest.mark.slow),
        pytest.param("fine_tuning", (), marks=pytest.mark.slow),
        pytest.param(
            "fine_tuning", ("actor.lora.rank=4", "actor.packing=false"), marks=pytest.mark.slow
        ),
    ],
    ids=["policy, likelihood", "policy, squared error", "language model", "lora, padded"],
)
def test_what_was_recorded_is_fitted_as_on_the_cpu(
    pretend: Pretend, kind: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, other = run_on_both(pretend, kind, tmp_path, "runner.total_steps=2", *overrides)
    assert_close(supervised_support.metrics(cpu), supervised_support.metrics(other))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("vision_language_action", ("actor.lora.rank=2",)),
        ("imitation", ()),
        pytest.param("vision_language_action", OFT, marks=pytest.mark.slow),
    ],
    ids=["pi05 lora", "pi05 imitates", "oft"],
)
def test_a_vision_language_action_model_is_trained_as_on_the_cpu(
    pretend: Pretend, kind: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, other = run_on_both(pretend, kind, tmp_path, *overrides)
    assert_close(supervised_support.metrics(cpu), supervised_support.metrics(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(*OFT, "actor.lora.rank=2"), ("model.method=flow_noise",)],
    ids=["oft lora", "pi05"],
)
def test_a_vision_language_action_model_is_trained_in_half_precision(
    pretend: Pretend, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    runs = run_on_both(
        pretend, "vision_language_action", tmp_path, *overrides, "actor.precision.param=bfloat16"
    )
    ((cpu,), (other,)) = map(supervised_support.metrics, runs)
    assert cpu.keys() == other.keys()
    assert cpu["actor/optimizer_steps"] == other["actor/optimizer_steps"] > 0
    for name in ("rollout/rewards", "env/return", "actor/entropy"):  # numbers of 8 bits
        assert other[name] == pytest.approx(cpu[name], rel=0.03), name


@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), marks=pytest.mark.slow), ("actor.lora.rank=4", "warm_start.steps=5")],
    ids=["whole", "lora"],
)
def test_a_language_model_is_trained_as_on_the_cpu(
    pretend: Pretend, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, other = run_on_both(pretend, "reasoning", tmp_path, "runner.total_steps=2", *overrides)
    assert_close(reasoning_support.untimed(cpu), reasoning_support.untimed(other))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes found, on each device."""

    def found(device: str) -> list[dict[str, Any]]:
        directory = tmp_path_factory.mktemp(device)
        return results_of(two_ranks.__name__, lambda rank: (device, rank, directory), seconds=500)

    return {device: found(device) for device in ("cpu", "pretend")}


@pytest.mark.slow
@pytest.mark.parametrize("case", two_ranks.CASES)
def test_two_processes_divide_a_language_model_as_on_the_cpu(
    case: str, of_two_ranks: dict[str, list[dict[str, Any]]]
) -> None:
    for cpu, pretend in zip(of_two_ranks["cpu"], of_two_ranks["pretend"], strict=True):
        one, other = cpu[case], pretend[case]
        assert one["gradients"].keys() == other["gradients"].keys()
        if "bfloat16" in case:  # of 8 bits: one update is compared, not what follows from it
            for name, gradient in one["gradients"].items():
                distance = (gradient - other["gradients"][name]).norm()
                assert distance < 0.03 * gradient.norm() + 1e-4, name
            continue
        assert_close(one["metrics"], other["metrics"])
        for name in one.keys() - {"metrics"}:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_a_tensor_that_is_left_behind_ends_the_run(pretend: Pretend, tmp_path: Path) -> None:
    wrong = pretend.run("forgetful", tmp_path / "run", "runner.total_env_steps=256")
    assert "Expected all tensors to be on the same device" in wrong


MEMORY = """
import os
from tests.pretend import accelerator
os.environ["RLINF_DEVICE"] = accelerator.NAME
import torch
calls = []
type(torch.pretend).empty_cache = lambda self: calls.append(1)
from rlinf.engines.config import HFEngineConfig
from rlinf.engines.hf import HFEngine
from rlinf.engines.protocol import ModelSource
from rlinf.trainers.ranks import Ranks
from tests.trainers import language_models
parts = {"weights": True, "optimizer": True, "gradients": True}
ranks = Ranks(device="pretend:0")
one = language_models.trainer(language_models.model(), name="grpo", ranks=ranks, offload=parts)
assert not one.gives_copies
one.offload()
assert one.gives_copies
trained = len(calls)
source = ModelSource(path=None, module=language_models.model(), shared=False, tokenizer=None)
engine = HFEngine(HFEngineConfig(), source)
engine.release_memory()
print(trained, len(calls) - trained)
"""


@pytest.mark.slow
def test_what_is_offloaded_is_given_back_to_other_processes() -> None:
    """The allocator of torch would keep it for this one."""
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == ["1", "1"], found.stderr
