"""Policies and Q functions on two ranks of FSDP2 against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.trainers.ranks import Ranks, Replicas
from rlinf.trainers.trainer import read_sharded, saved_weights
from tests.algorithms import test_nft
from tests.models import test_steering
from tests.trainers import divided_rows

NEAR = {"rtol": 1e-3, "atol": 2e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return divided_rows.run(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return divided_rows.observe(Replicas(), folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_compute_what_one_process_computes(two, alone, rank):
    found = two[rank]
    for mine, theirs in zip(found["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert list(found["weights"]) == list(alone["weights"])
    for kind in ("weights", "adapted", "acting", "steered"):
        for name, tensor in alone[kind].items():
            torch.testing.assert_close(found[kind][name], tensor, **NEAR)
    for name, column in alone["twins"].items():
        assert found["twins"][name].keys() == column.keys()
        for key, tensor in column.items():
            torch.testing.assert_close(found["twins"][name][key], tensor, **NEAR)


def test_one_process_goes_on_from_two_ranks(two, folder):
    assert two[1]["state"] == {}
    whole, sharded = (divided_rows.ppo(Ranks(), seed=9) for _ in range(2))
    whole.load_state_dict(two[0]["state"])
    sharded.load_sharded(folder / "policy")
    weights = saved_weights(two[0]["state"], "policy")
    assert weights.keys() == two[0]["weights"].keys()
    for one in (whole, sharded):
        assert one.version == 1
        for name, tensor in one.weights():
            assert torch.equal(tensor, weights[name]), name
    assert torch.equal(whole.reference.weights[0], sharded.reference.weights[0])
    assert whole.modules.held["policy"].optimizer.steps == 4


def test_one_process_acts_as_two_ranks_did(two, folder):
    whole, sharded = (test_nft.trainer(tau=0.5, ranks=Ranks()) for _ in range(2))
    whole.load_state_dict(two[0]["flow"])
    sharded.load_sharded(folder / "flow")
    acting = saved_weights(two[0]["flow"], "policy")
    for one in (whole, sharded):
        for name, tensor in one.weights():
            assert torch.equal(tensor, two[0]["acting"][name]), name
            assert torch.equal(tensor, acting[name]), name


@pytest.mark.parametrize(("name", "kind"), [("policy", "state"), ("flow", "flow")])
def test_what_acts_is_read_from_parts_without_a_trainer(two, folder, name, kind):
    whole, found = two[0][kind], read_sharded(folder / name)
    assert found["version"] == whole["version"]
    expected, weights = saved_weights(whole, "policy"), saved_weights(found, "policy")
    assert weights.keys() == expected.keys()
    for each, tensor in expected.items():
        assert torch.equal(weights[each], tensor), each


def test_one_process_steers_as_two_ranks_did(two, folder):
    one = test_steering.trainer(Ranks())
    one.load_sharded(folder / "steered")
    found = dict(one.weights())
    assert found.keys() == two[0]["steered"].keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, two[0]["steered"][name]), name
