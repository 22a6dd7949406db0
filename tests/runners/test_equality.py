"""One program, any placement: the same metrics and weights, to the bit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.models.gaussian import MLPPolicy
from rlinf.monitor.run_directory import RunDirectory
from rlinf.runners.embodied import Embodied
from rlinf.runners.run import Run
from rlinf.scheduler.cpu_slots import available_cores
from rlinf.scheduler.services.network import NetworkService
from rlinf.workers.rollout import RolloutWorker

from .support import assert_equal_runs, metrics, small_config, weights

SPLIT = ("rollout.block_size=4", "cluster.cpu_devices_per_node=2")
PLACEMENTS = {
    "collocated": "{'env,rollout,actor': '0-1'}",
    "one device": "{'env,rollout,actor': '0'}",
    "disaggregated": "{env: '0', 'rollout,actor': '1'}",
    "hybrid": "{env: '0', rollout: '1', actor: '0-1'}",
}

needs_two_cores = pytest.mark.skipif(
    len(available_cores()) < 2, reason="two CPU slots need two cores"
)


def train(directory: Path, *overrides: str) -> Path:
    directory.mkdir()
    config = small_config(directory, *overrides)
    run = RunDirectory.create(config.runner.output_dir, "small", path=directory / "run")
    with run:
        Run(Embodied, config, run, threading.Event()).run()
    return run.path


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("reference") / "one", "rollout.block_size=4")


# One stage where placements are mixed; what several change includes the others.
STAGED = [
    pytest.param(name, stages, marks=() if stages == 2 or name == "hybrid" else pytest.mark.slow)
    for name in PLACEMENTS
    for stages in (1, 2)
]


@needs_two_cores
@pytest.mark.parametrize(("placement", "stages"), STAGED)
def test_placements_and_pipeline_stages(reference, tmp_path, placement, stages):
    run = train(
        tmp_path / "run",
        *SPLIT,
        f"cluster.component_placement={PLACEMENTS[placement]}",
        f"rollout.pipeline_stage_num={stages}",
    )
    assert_equal_runs(reference, run)


@needs_two_cores
def test_evaluations_by_drawn_actions_do_not_depend_on_who_plays(reference, tmp_path):
    drawn = ("rollout.block_size=4", "evaluation.deterministic=false")
    one = train(tmp_path / "one", *drawn)
    place = f"cluster.component_placement={PLACEMENTS['collocated']}"
    split = train(tmp_path / "split", *drawn, *SPLIT, place, "rollout.pipeline_stage_num=2")
    assert_equal_runs(one, split)
    evaluated = [[row["eval/return"] for row in metrics(run) if "eval/return" in row]
                 for run in (one, split, reference)]  # fmt: skip
    assert evaluated[0] == evaluated[1]
    assert all(a != b for a, b in zip(evaluated[0], evaluated[2], strict=True))
    trained = [weights(run) for run in (one, reference)]
    for name, each in trained[0].items():  # it trains as without
        np.testing.assert_array_equal(each, trained[1][name], err_msg=name)


@needs_two_cores
def test_means_over_episodes_do_not_depend_on_who_played_them(tmp_path):
    short = ("env.train.max_episode_steps=5", "runner.total_env_steps=512", *SPLIT)
    one, two = (
        train(tmp_path / name, *short, f"cluster.component_placement={PLACEMENTS[name]}")
        for name in ("one device", "collocated")
    )
    assert_equal_runs(one, two)


@needs_two_cores
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_slow_network_changes_the_time_alone(reference, tmp_path, monkeypatch, runtime):
    crossed = []
    book = NetworkService.book

    def booked(network, source, destinations, nbytes):
        crossed.append((source, *destinations))
        return book(network, source, destinations, nbytes)

    monkeypatch.setattr(NetworkService, "book", booked)
    links = "[{src: 'env:0-1', dst: 'rollout:0-1', delay_ms: 2}"
    links += ", {src: 'actor:0', dst: 'rollout:0-1', delay_ms: 5}]"
    narrow = "[{members: ['rollout:0', 'rollout:1'], bandwidth_mbps: 100}]"
    run = train(
        tmp_path / "run",
        *SPLIT,
        f"cluster.runtime={runtime}",
        f"cluster.component_placement={PLACEMENTS['collocated']}",
        "rollout.pipeline_stage_num=2",
        f"cluster.net_emulation={{enabled: true, crossdc_pairs: {links},"
        f" bandwidth_groups: {narrow}}}",
    )
    assert_equal_runs(reference, run)
    assert {("env:0", "rollout:0"), ("rollout:1", "env:1")} < set(crossed)
    assert ("actor:0", "rollout:0", "rollout:1") in crossed


# With pipeline stages and two actor ranks; the others take as long to start.
ON_RAY = [
    name if name == "hybrid" else pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS
]


@needs_two_cores
@pytest.mark.parametrize("placement", ON_RAY)
def test_ray_gives_the_same_as_local(reference, tmp_path, placement):
    stages = 2 if placement == "hybrid" else 1
    run = train(
        tmp_path / "run",
        *SPLIT,
        "cluster.runtime=ray",
        f"cluster.component_placement={PLACEMENTS[placement]}",
        f"rollout.pipeline_stage_num={stages}",
    )
    assert_equal_runs(reference, run)


@needs_two_cores
@pytest.mark.parametrize("stages", [1, 2])
def test_values_are_the_same_while_waiting_and_at_the_end(reference, tmp_path, monkeypatch, stages):
    alone = []
    values = RolloutWorker._values

    def counted(worker, observations):
        alone.append(len(observations) == 1)
        return values(worker, observations)

    monkeypatch.setattr(RolloutWorker, "_values", counted)
    monkeypatch.setattr(MLPPolicy, "values_in_parts", True)
    run = train(
        tmp_path / "run",
        *SPLIT,
        f"cluster.component_placement={PLACEMENTS['disaggregated']}",
        f"rollout.pipeline_stage_num={stages}",
    )
    assert all(alone)
    assert_equal_runs(reference, run)


@needs_two_cores
@pytest.mark.parametrize(("little", "cores"), [(10**7, 1), (0, len(available_cores()))])
def test_little_is_computed_on_one_core_while_simulators_work(
    reference, tmp_path, monkeypatch, little, cores
):
    found = {"sample": set(), "evaluate_actions": set()}

    def counted(name):
        method = getattr(MLPPolicy, name)

        def call(policy, *arguments):
            found[name].add(torch.get_num_threads())
            return method(policy, *arguments)

        monkeypatch.setattr(MLPPolicy, name, call)

    for name in found:
        counted(name)
    monkeypatch.setattr("rlinf.models.policy._LITTLE", little)
    run = train(tmp_path / "run", "rollout.block_size=4", "cluster.cpu_devices_per_node=1")
    assert found == {"sample": {cores}, "evaluate_actions": {len(available_cores())}}
    assert_equal_runs(reference, run)


@needs_two_cores
@pytest.mark.slow
def test_parameters_divided_among_two_processes_learn_as_whole_ones(reference, tmp_path):
    run = train(
        tmp_path / "run",
        *SPLIT,
        "cluster.runtime=ray",
        f"cluster.component_placement={PLACEMENTS['hybrid']}",
        "actor.type=fsdp",
    )
    whole, divided = metrics(reference), metrics(run)
    assert len(whole) == len(divided) > 0
    for one, other in zip(whole, divided, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            # Two processes add the same float32 numbers in another order.
            assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    before, after = weights(reference), weights(run)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_seeds_give_different_runs(reference, tmp_path):
    run = train(tmp_path / "run", "rollout.block_size=4", "seed=8")
    with pytest.raises(AssertionError):
        assert_equal_runs(reference, run)
