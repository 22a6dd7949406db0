"""Several processes against one: data and tensor parallelism, both, checkpoints of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainers import two_ranks
from tests.trainers.language_models import model, naive_log_probs, random_batch, trainer

KINDS = ("master", "exp_avg", "exp_avg_sq")
NONE: dict[str, Any] = {"weights": {}}
KEYS = [
    (case, family, tied)
    for case in two_ranks.CASES
    for family, tied in two_ranks.MODELS.get(case, [("qwen2", True)])
]

ON_GRID = [
    (case, family, tied)
    for case in two_ranks.GRID
    for family, tied in two_ranks.MODELS.get(case, [("qwen2", True)])
]

BETWEEN_DATA, BETWEEN_TENSOR, HALF = 1e-6, 2e-6, 0.03
"""Bounds of the distance of gradients from those of one rank, as a part of their norm. Data ranks
add the same float32 numbers in another order (6e-7 was seen); tensor ranks do so inside of each
layer, whose outputs then differ too (9e-7 was seen); bfloat16 has 8 bits (0.017 was seen)."""


def label(case: str, family: str, tied: bool) -> str:
    return f"{case}, {family}, {'tied' if tied else 'untied'}"


def alone(case: str, family: str = "qwen2", tied: bool = True, seed: int = 0) -> Any:
    config = dict((two_ranks.CASES | two_ranks.GRID)[case])
    config.pop("tensor_parallel_size", None)
    return trainer(model(family, tied=tied, seed=seed), keys=two_ranks.REFERENCE, **config)


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["modules"]["policy"]["steps"] == other["modules"]["policy"]["steps"]
    assert one["version"] == other["version"]
    for columns in [
        *((one["modules"]["policy"][kind], other["modules"]["policy"][kind]) for kind in KINDS),
        ((one["reference"] or NONE)["weights"], (other["reference"] or NONE)["weights"]),
    ]:
        assert columns[0].keys() == columns[1].keys()
        for name, tensor in columns[0].items():
            assert torch.equal(tensor, columns[1][name]), name


def assert_same_gradients(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    """Of the first update, in which the weights are still equal."""
    assert found.keys() == expected.keys()
    norm = sum(float(tensor.double().square().sum()) for tensor in expected.values()) ** 0.5
    errors = {name: found[name].double() - tensor.double() for name, tensor in expected.items()}
    distance = sum(float(error.square().sum()) for error in errors.values()) ** 0.5
    assert norm > 0.1
    assert distance < bound * norm, distance / norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return two_ranks.run(two_ranks.compare, folder)


@pytest.fixture(scope="module")
def grid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid")


@pytest.fixture(scope="module")
def four(grid_folder: Path) -> list[dict[str, Any]]:
    return two_ranks.run(two_ranks.compare, grid_folder, count=4)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: label(*key))
def test_two_ranks_compute_what_one_computes(two, key):
    assert_computes_what_one_computes(two, key)


@pytest.mark.slow
@pytest.mark.parametrize("key", ON_GRID, ids=lambda key: label(*key))
def test_two_times_two_ranks_compute_what_one_computes(four, key):
    assert_computes_what_one_computes(four, key)


def assert_computes_what_one_computes(results, key):
    one = alone(*key)
    start = {name: tensor.clone() for name, tensor in one.weights()}
    expected = two_ranks.observe(one)
    half = "bfloat16" in key[0]
    bound = BETWEEN_DATA if "data" in key[0] else BETWEEN_TENSOR
    for result in results:
        found = result[label(*key)]
        assert_same_gradients(found["gradients"], expected["gradients"], HALF if half else bound)
        # Tensor ranks add outputs of a layer that were rounded to bfloat16; 0.026 was seen.
        near = 0.1 if half and "grid" in key[0] else 1e-5
        for name in ("log_probs", "entropy", "reference"):
            torch.testing.assert_close(found[name], expected[name], atol=near, rtol=1e-5)
        assert list(found["weights"]) == list(expected["weights"])
        for name, tensor in expected["weights"].items():
            if half and "k_proj.bias" in name:
                continue  # its gradient is 0 but for rounding, and Adam makes full steps of that
            if half:
                moved = (tensor - start[name]).abs().float().mean()
                difference = (found["weights"][name] - tensor).abs().float().mean()
                # Adam makes full steps of what bfloat16 rounds; 0.152 was seen on one processor.
                assert difference < 0.2 * moved, name
            else:
                torch.testing.assert_close(found["weights"][name], tensor, atol=2e-5, rtol=1e-4)
        for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            for name in set() if half else mine.keys() - {"actor/tokens"}:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("key", KEYS, ids=lambda key: label(*key))
def test_one_rank_goes_on_from_two(two, folder, key):
    assert_one_rank_goes_on(two, folder, key)


@pytest.mark.slow
@pytest.mark.parametrize("key", ON_GRID, ids=lambda key: label(*key))
def test_one_rank_goes_on_from_two_times_two(four, grid_folder, key):
    assert_one_rank_goes_on(four, grid_folder, key)


def assert_one_rank_goes_on(results, folder, key):
    state = results[0][label(*key)]["state"]
    assert all(result[label(*key)]["state"] == {} for result in results[1:])
    whole, sharded = alone(*key, seed=0), alone(*key, seed=0)
    for parameter in sharded.modules.held["policy"].named.values():
        parameter.data.mul_(0.5)
    whole.load_state_dict(state)
    sharded.load_sharded(folder / f"sharded-{label(*key)}")
    assert_same_state(whole.state_dict(), state)
    assert_same_state(sharded.state_dict(), state)
    batch = random_batch(13)
    torch.testing.assert_close(whole.log_probs(batch), sharded.log_probs(batch), atol=0, rtol=0)
    if "bfloat16" not in key[0]:
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"model-{label(*key)}")
        expected = naive_log_probs(loaded, batch)
        torch.testing.assert_close(whole.log_probs(batch), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_ranks_go_on_from_one(tmp_path_factory, count):
    folder = tmp_path_factory.mktemp(f"to-{count}")
    one = alone("data")
    for step in range(2):
        one.train(two_ranks.rollout(), step)
    state = one.state_dict()
    torch.save(state, folder / "state.pt")
    one.save_sharded(folder / "sharded")
    results = two_ranks.run(two_ranks.resume, folder, count=count)
    more = one.train(two_ranks.rollout(), 2)
    saved = torch.load(folder / "state.pt")
    assert len(results[0]) == {2: 4, 4: 2}[count]
    for name, found in results[0].items():
        assert_same_state(found["state"], saved)
        assert found["more"] == pytest.approx(more, rel=1e-3, abs=1e-4), name
