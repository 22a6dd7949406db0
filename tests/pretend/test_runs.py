"""Whole runs on a device whose tensors refuse to mix with the host's, beside the CPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from tests.pretend import two_ranks
from tests.runners import reasoning_support, supervised_support, support
from tests.trainers.processes import results_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends written in Python",
)


def run(
    device: str, kind: str, directory: Path, *overrides: str
) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    program = [sys.executable, "-m", "tests.pretend.program", device, kind, str(directory)]
    return subprocess.run(
        [*program, *overrides], capture_output=True, text=True, timeout=250, check=False
    )


def run_on_both(kind: str, directory: Path, *overrides: str) -> tuple[Path, Path]:
    runs = []
    for device in ("cpu", "pretend"):
        done = run(device, kind, directory / device, *overrides)
        assert done.returncode == 0, done.stderr
        runs.append(directory / device / "run")
    return runs[0], runs[1]


def assert_close(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


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
def test_a_policy_is_trained_as_on_the_cpu(overrides: tuple[str, ...], tmp_path: Path) -> None:
    cpu, pretend = run_on_both("embodied", tmp_path, *overrides)
    assert_close(support.metrics(cpu), support.metrics(pretend))


def test_transitions_of_a_replay_are_trained_on_as_on_the_cpu(tmp_path: Path) -> None:
    cpu, pretend = run_on_both("off_policy", tmp_path, "runner.total_env_steps=384")
    assert_close(support.metrics(cpu), support.metrics(pretend))


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
    kind: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, pretend = run_on_both(kind, tmp_path, "runner.total_steps=2", *overrides)
    assert_close(supervised_support.metrics(cpu), supervised_support.metrics(pretend))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("actor.lora.rank=4",)], ids=["whole", "lora"])
def test_a_language_model_is_trained_as_on_the_cpu(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cpu, pretend = run_on_both("reasoning", tmp_path, "runner.total_steps=2", *overrides)
    assert_close(reasoning_support.untimed(cpu), reasoning_support.untimed(pretend))


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


def test_a_tensor_that_is_left_behind_ends_the_run(tmp_path: Path) -> None:
    done = run("pretend", "forgetful", tmp_path / "run", "runner.total_env_steps=256")
    assert done.returncode != 0
    assert "Expected all tensors to be on the same device" in done.stderr
