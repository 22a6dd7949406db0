"""Rollout and trainer hand devices to each other inside a step."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("ray")

from rlinf.engines.config import SGLangEngineConfig, VLLMEngineConfig
from rlinf.errors import ConfigError
from rlinf.monitor.decisions import read_decisions
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.reasoning import Reasoning
from rlinf.runners.rescaling import order_problems, rescaling_problems, write_choices
from rlinf.runners.run import Run

from .reasoning_support import assert_equal_runs, small_config, train, untimed, weights
from .test_actor_ranks import ABSOLUTE, RELATIVE, STEPS
from .test_reasoning import PLACEMENTS, needs_two_cores

BY_LENGTH = (
    "actor={type: fsdp, n_minibatches: 4, shuffle: false, order: length, optim: {lr: 1.0e-3}}",
    "rollout.sampling={max_new_tokens: 120}",
    "rollout.prompts=8",
    "model.architecture={max_position_embeddings: 160, layers: 6}",
    "warm_start=null",
    f"runner.total_steps={STEPS}",
)
SHARED = (
    "cluster.runtime=ray",
    "cluster.cpu_devices_per_node=2",
    "cluster.component_placement={'rollout,actor': '0-1', reward: '1'}",
    "cluster.auto_scheduler=true",
)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("static"), *BY_LENGTH)


def assert_same(static: Path, run: Path, *, steps: int = STEPS) -> list[dict[str, float]]:
    """The metrics of a run that rescales, which differ from those of a static one by rounding."""
    first, second = untimed(static), untimed(run)
    assert len(first) == len(second) > steps
    for left, right in zip(first, second, strict=True):
        assert right.keys() - left.keys() <= {"rollout/moved", "actor/ranks_most"}
        for name, value in left.items():
            assert right[name] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE), name
    before, after = weights(static), weights(run)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=RELATIVE, atol=ABSOLUTE, err_msg=name)
    return second


@pytest.mark.slow
@needs_two_cores
def test_a_short_run_that_rescales_computes_what_a_static_one_does(tmp_path: Path) -> None:
    short = (
        *BY_LENGTH,
        "runner.total_steps=1",
        # A few answers of both workers run on for so long that one mostly gives its device up.
        "seed=2",
        "rollout.sampling={max_new_tokens: 120, temperature: 0.1}",
        "model.architecture={max_position_embeddings: 160, layers: 2}",
    )
    static = train(tmp_path / "static", *short)
    run = train(tmp_path / "run", *short, *SHARED)
    # Whether any moved in so short a run is a matter of time; that they do is for longer runs.
    assert_same(static, run, steps=1)


@needs_two_cores
@pytest.mark.slow
def test_placements_by_length_give_the_same_bits(static: Path, tmp_path: Path) -> None:
    run = train(
        tmp_path,
        *BY_LENGTH,
        "cluster.cpu_devices_per_node=2",
        f"cluster.component_placement={PLACEMENTS['disaggregated']}",
    )
    assert_equal_runs(static, run)


@needs_two_cores
@pytest.mark.slow
def test_a_run_that_rescales_computes_what_a_static_one_does(static: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *BY_LENGTH, *SHARED)
    second = assert_same(static, run)
    kinds = [decision.reason.split()[0] for decision in read_decisions(run)]
    assert kinds.count("borrow") >= 1
    assert kinds.count("release") >= 1
    assert kinds.count("resize") >= 1
    assert sum(line.get("rollout/moved", 0) for line in second) > 0
    assert max(line.get("actor/ranks_most", 0) for line in second) == 2


@needs_two_cores
@pytest.mark.slow
def test_four_ranks_compute_what_one_does(
    static: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    run = train(
        tmp_path,
        *BY_LENGTH,
        *SHARED,
        "cluster.cpu_devices_per_node=4",
        "cluster.component_placement={'rollout,actor': '0-3', reward: '1'}",
    )
    second = assert_same(static, run)
    # When a device is free is a matter of time; with all four is tested where nothing is timed.
    assert max(line.get("actor/ranks_most", 0) for line in second) >= 2


@needs_two_cores
@pytest.mark.slow
def test_a_stopped_run_goes_on(static: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *BY_LENGTH, *SHARED, "runner.total_steps=2")
    with RunDirectory.open(run) as directory:
        longer = small_config(tmp_path, *BY_LENGTH, *SHARED)
        Run(Reasoning, longer, directory, threading.Event()).run(resume=True)
    assert_same(static, run)


@needs_two_cores
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_equal_lengths_leave_the_ranks_where_they_are(tmp_path: Path, layout: str) -> None:
    """Checkpoints are written and read while both ranks have a part of the model."""
    equal = (*BY_LENGTH, "rollout.sampling={max_new_tokens: 24, min_new_tokens: 24}")
    static = train(tmp_path / "static", *equal)
    shared = (*SHARED, f"checkpoint.layout={layout}")
    run = train(tmp_path / "run", *equal, *shared, "runner.total_steps=2")
    with RunDirectory.open(run) as directory:
        longer = small_config(tmp_path / "run", *equal, *shared)
        Run(Reasoning, longer, directory, threading.Event()).run(resume=True)
    second = assert_same(static, run)
    assert {line["actor/ranks_most"] for line in second if "actor/ranks_most" in line} == {2.0}
    resizes = [d for d in read_decisions(run) if d.reason.startswith("resize")]
    assert len(resizes) <= 2  # to two ranks, where a run begins and where it goes on


def test_a_run_that_does_not_rescale_loads_nothing_of_it() -> None:
    code = (
        "import sys, rlinf.runners.reasoning;"
        "print(*[name for name in sys.modules if name.startswith('rlinf.rescale')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_a_disk_that_is_full_does_not_stop_a_step_that_rescales(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice = {
        "action": "borrow", "count": 1, "reason": "a test", "cost_seconds": 0.0,
        "gain_seconds": 1.0, "numbers": {},
    }  # fmt: skip
    # Nothing can be written where a file is in the way of the directory, whoever asks.
    (tmp_path / "run").write_text("")
    write_choices(tmp_path / "run", 1, [choice])
    assert "a decision was not written (Not a directory)" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("{type: reinforce_pp, kl_reward_beta: 0.01}", ()),
        ("{type: grpo, proximal: recomputed}", ()),
        ("{type: grpo, normalize_advantages: true}", ()),
        ("{type: ppo}", ("critic={}",)),
    ],
)
def test_an_algorithm_that_needs_the_whole_rollout_has_no_batches_by_length(
    tmp_path: Path, algorithm: str, more: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"actor\.order.*needs all of it.*order: position"):
        small_config(tmp_path, *BY_LENGTH, f"algorithm={algorithm}", *more)


def test_an_engine_that_does_not_tell_lengths_has_no_batches_by_length(tmp_path: Path) -> None:
    config = small_config(tmp_path, *BY_LENGTH)
    assert list(order_problems(config)) == []
    rollout = config.rollout.model_copy(update={"engine": SGLangEngineConfig()})
    (problem,) = order_problems(config.model_copy(update={"rollout": rollout}))
    assert "the engine sglang does not tell; order: position" in problem.message()


def test_devices_are_not_lent_by_an_engine_that_generates_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    config = small_config(tmp_path, *BY_LENGTH, *SHARED)
    for asynchronous in (False, True):
        engine = VLLMEngineConfig(asynchronous=asynchronous)
        rollout = config.rollout.model_copy(update={"engine": engine})
        found = list(rescaling_problems(config.model_copy(update={"rollout": rollout})))
        assert len(found) == asynchronous
    assert "by whose times cluster.auto_scheduler decides; nearest: false" in found[0].message()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("cluster.runtime=local",), "cluster.runtime: ray"),
        (("cluster.component_placement={'rollout,actor': '0', reward: '1'}",), "same devices"),
        (("actor.order=position",), "actor.order"),
        (("algorithm={type: ppo}", "critic={}"), "critic"),
        (("rollout.max_staleness=1",), "run ahead"),
        (("actor.shuffle=true",), "shuffled"),
        (("algorithm={type: dapo}",), "drawn again"),
        (("cluster.plan=auto",), "cluster.plan"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, ...], why: str
) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    assert small_config(tmp_path, *BY_LENGTH, *SHARED).cluster.auto_scheduler
    with pytest.raises(ConfigError, match=why):
        small_config(tmp_path, *BY_LENGTH, *SHARED, *change)
