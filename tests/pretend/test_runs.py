"""Whole runs on a device whose tensors refuse to mix with the host's, beside the CPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration

from tests.runners import reasoning_support, supervised_support, support

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
    cpu, pretend = run_on_both("off_policy", tmp_path, "runner.total_env_steps=512")
    assert_close(support.metrics(cpu), support.metrics(pretend))


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("cloning", ()),
        ("cloning", ("objective=squared_error",)),
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


def test_a_tensor_that_is_left_behind_ends_the_run(tmp_path: Path) -> None:
    done = run("pretend", "forgetful", tmp_path / "run", "runner.total_env_steps=256")
    assert done.returncode != 0
    assert "Expected all tensors to be on the same device" in done.stderr
