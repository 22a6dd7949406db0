"""Normalisation statistics: formulas, published files, conventions, and what does not belong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.envs.spec import refuse_foreign_actions
from rlinf.errors import ConfigError
from rlinf.models.vla.conventions import ActionConventions, GripperConvention
from rlinf.models.vla.statistics import ModelStatistics, Statistics, Units
from rlinf.models.vla.statistics_files import read_statistics

RAW = np.random.default_rng(0).normal([0, 5, -2], [1, 0.1, 3], (500, 3)).astype(np.float32)


def statistics(raw: np.ndarray = RAW, mask: list[bool] | None = None) -> Statistics:
    """Of recorded rows."""
    return Statistics.of({
        "mean": raw.mean(0), "std": raw.std(0), "min": raw.min(0), "max": raw.max(0),
        "q01": np.quantile(raw, 0.01, axis=0), "q99": np.quantile(raw, 0.99, axis=0), "mask": mask,
    })  # fmt: skip


def test_methods_are_the_published_formulas_and_have_inverses() -> None:
    x, held = torch.from_numpy(RAW), statistics()
    q01, q99 = np.quantile(RAW, [0.01, 0.99], axis=0)
    wanted = {
        "mean_std": (RAW - RAW.mean(0)) / (RAW.std(0) + 1e-6),
        "quantiles": 2 * (RAW - q01) / (q99 - q01 + 1e-6) - 1,
        "bounds": 2 * (RAW - RAW.min(0)) / (RAW.max(0) - RAW.min(0)) - 1,
    }
    for method, expected in wanted.items():
        units = Units(held, method)
        found = units.normalize(x)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        torch.testing.assert_close(units.unnormalize(found), x, atol=2e-5, rtol=1e-5)


def test_masked_and_padded_dimensions_pass_unchanged() -> None:
    units = Units(statistics(mask=[True, True, False]), "quantiles")
    x = torch.randn(4, 2, 5)
    found = units.normalize(x)
    assert torch.equal(found[..., 2:], x[..., 2:])
    assert not torch.isclose(found[..., :2], x[..., :2]).all()
    torch.testing.assert_close(units.unnormalize(found), x)
    assert torch.equal(units.normalize(x[..., :2]), found[..., :2])  # fewer dimensions
    assert units.state_dict() == {}  # the file beside the weights says it


@pytest.mark.parametrize(
    ("values", "method", "told"),
    [
        (
            {"mean": [0.0, 1.0], "std": [1.0, float("nan")]},
            "mean_std",
            "the statistics of actions hold nan as std of dimension 1",
        ),
        (
            {"q01": [float("-inf"), 0.0], "q99": [1.0, 1.0]},
            "quantiles",
            "the statistics of actions hold -inf as q01 of dimension 0",
        ),
        (
            {"mean": [0.5, 1.0], "std": [0.0, 0.0]},
            "mean_std",
            "never change: mean and std leave no width",
        ),
        ({"min": [1.0, 1.0], "max": [1.0, 1.0]}, "bounds", "never change: min and max leave no"),
    ],
)
def test_statistics_that_scale_nothing_are_refused(
    values: dict[str, list[float]], method: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Statistics.of(values).require(method, of="actions")


@pytest.mark.parametrize(("method", "there"), [("bounds", 0.0), ("min_max", -1.0)])
def test_a_dimension_that_never_moved_is_one_number(method: Any, there: float) -> None:
    units = Units(Statistics.of({"min": [1.0, 0.0], "max": [1.0, 2.0]}), method)
    x = torch.tensor([[1.0, 2.0]])
    assert units.normalize(x).tolist() == [[there, 1.0]]
    assert units.normalize(torch.tensor([[7.0, 2.0]])).tolist() == [[there, 1.0]]
    assert units.unnormalize(units.normalize(x)).tolist() == x.tolist()


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "assets/mine/norm_stats.json": lambda a, s: {"norm_stats": {"state": s, "actions": a}},
    "mine/norm_stats.json": lambda a, s: {"norm_stats": {"state": s, "actions": a}},
    "dataset_statistics.json": lambda a, s: {"mine": {"action": a, "proprio": s}},
    "meta/stats.json": lambda a, s: {"observation.state": s, "action": a},
    "experiment_cfg/metadata.json": lambda a, s: {
        "mine": {"statistics": {"state": {"state": s}, "action": {"action": a}}}
    },
}
"""Content of each published file, of the statistics of actions and states."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name: str, tmp_path: Path) -> None:
    actions, states = statistics(mask=[True, True, False]), statistics(RAW[:, :2])
    content = LAYOUTS[name](*(
        {key: value.tolist() for key, value in each.given().items()} for each in (actions, states)
    ))  # fmt: skip
    published(tmp_path, name, content)
    found = read_statistics(tmp_path, None if name == "meta/stats.json" else "mine")
    for name, value in actions.given().items():
        torch.testing.assert_close(getattr(found.actions, name), value)
    assert found.states is not None
    assert found.states.dim == 2


def published(directory: Path, name: str, content: object) -> Path:
    """A file of a published directory."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return directory


def test_published_files(tmp_path: Path) -> None:
    vector = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-1.0, -2.0], "q99": [1.0, 2.0]}
    pi = published(
        tmp_path / "pi", "assets/physical-intelligence/libero/norm_stats.json",
        {"norm_stats": {"state": vector, "actions": vector}},
    )  # fmt: skip
    assert read_statistics(pi).key == "physical-intelligence/libero"
    shutil.move(pi / "assets" / "physical-intelligence", pi / "physical-intelligence")
    assert read_statistics(pi).key == "physical-intelligence/libero"
    more = {**vector, "max": [1, 1], "min": [0, 0], "mask": [True, False]}
    vla = published(
        tmp_path / "vla", "config.json",
        {"norm_stats": {"bridge_orig": {"action": more, "proprio": more, "num_transitions": 9}}},
    )  # fmt: skip
    assert read_statistics(vla).actions.mask.tolist() == [True, False]
    published(vla, "dataset_statistics.json", {"libero_spatial_no_noops": {"action": more}})
    assert read_statistics(vla, "libero_spatial_no_noops").states is None
    with pytest.raises(ConfigError, match="did you mean `bridge_orig`"):
        read_statistics(vla, "bridge_org")
    with pytest.raises(ConfigError, match="2 data sets; nearest: one of bridge_orig, libero"):
        read_statistics(vla)
    part = {"mean": [0.5], "std": [1.0], "min": [0], "max": [1], "q01": [0], "q99": [1]}
    robot = published(
        tmp_path / "groot", "experiment_cfg/metadata.json",
        {"new_embodiment": {"embodiment_tag": "new_embodiment", "modalities": {}, "statistics": {
            "state": {"arm": vector, "hand": part}, "action": {"arm": vector, "hand": part}}}},
    )  # fmt: skip
    assert read_statistics(robot).actions.mean.tolist() == [0.0, 1.0, 0.5]


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^statistics: .* has no statistics; known files"):
        read_statistics(tmp_path)
    published(
        tmp_path, "norm_stats.json", {"norm_stats": {"actions": {"mean": [1], "std": [1, 2]}}}
    )
    with pytest.raises(ConfigError, match=r"vectors of \[1, 2\] dimensions"):
        read_statistics(tmp_path)
    (tmp_path / "norm_stats.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_statistics(tmp_path)
    published(tmp_path, "assets/arm/norm_stats.json", {"one": {"actions": {"mean": [1.0]}}})
    (tmp_path / "norm_stats.json").unlink()
    assert read_statistics(tmp_path).key == "arm/one"
    short = ModelStatistics(Statistics.of({"mean": [0.0], "std": [1.0]}))
    with pytest.raises(ConfigError, match=r"of actions have no min and max, .* but mean, std"):
        short.require({"actions": "bounds"}, key="model.statistics")
    with pytest.raises(ConfigError, match="have none of states, which the model reads"):
        short.require({"actions": "mean_std", "states": "mean_std"}, key="model.statistics")


def test_statistics_of_something_else_are_refused() -> None:
    own = ModelStatistics(Statistics.of({"q01": [-0.9, 0.0], "q99": [0.9, 1.0]}), key="mine")
    own.check([-1, 0], [1, 1])
    own.check([0], [1], dimensions=[1])
    with pytest.raises(ConfigError, match="`mine` are of 2 action dimensions, the environment"):
        own.check([-1] * 3, [1] * 3)
    with pytest.raises(ConfigError, match="dimensions 0 and 1 swapped"):
        own.check([0, -1], [1, 1])
    for mean, told in {50: "from 38 to 62", 0: "from -12 to 12", 1.2: "from 1.16 to"}.items():
        std = 0.1 if mean == 1.2 else 30.0
        foreign = ModelStatistics(Statistics.of({"mean": [0.0, mean], "std": [1.0, std]}))
        with pytest.raises(ConfigError, match=f"mean ± 0.4 std: action dimension 1 goes {told}"):
            foreign.check([-1] * 2, [1] * 2)
        foreign.check([-1] * 2, [1] * 2, otherwise=[1])
    with pytest.raises(ConfigError, match="goes from -40 to 30, in the environment from -1 to 1"):
        refuse_foreign_actions([-40, 0], [30, 1], [-1, -1], [1, 1], what="set")


@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.1, 0.5, 0.9, 0.998, 1.0])
@pytest.mark.parametrize("beyond", [1.0, 1.1])
def test_mean_and_deviation_of_what_lies_in_the_box_are_never_refused(
    share: float, beyond: float
) -> None:
    """As of a gripper, which is at one edge and at the other: no values lie wider about a mean."""
    recorded = np.where(np.arange(1000) < 1000 * share, beyond, -1.0)
    held = Statistics.of({"mean": [recorded.mean()], "std": [recorded.std()]})
    ModelStatistics(held).check([-1], [1])


def test_conventions_go_both_ways() -> None:
    gripper = GripperConvention(dimension=2, model_range=(0, 1), env_range=(1, -1))
    held = ActionConventions(dimensions=(0, 1, 6), gripper=gripper, delta_dimensions=(0, 1))
    states = torch.tensor([[10.0, 20.0, 0.0]])
    chunk = torch.zeros(1, 2, 8)
    chunk[..., 0], chunk[..., 1], chunk[..., 6] = 1.0, 2.0, torch.tensor([0.25, 1.0])
    env = held.to_env(chunk, 3, states)
    assert env.tolist() == [[[11.0, 22.0, 0.5], [11.0, 22.0, -1.0]]]
    torch.testing.assert_close(held.to_model(env, 8, states), chunk)
    hard = ActionConventions(gripper=GripperConvention(
        dimension=0, model_range=(0, 1), env_range=(1, -1), threshold=0.5))  # fmt: skip
    assert hard.to_env(torch.tensor([[[0.4], [0.6]]]), 1).tolist() == [[[1.0], [-1.0]]]
    held.check_dimensions(3, 8, 3)
    with pytest.raises(ConfigError, match="delta_dimensions: names dimension 1, there are 1"):
        held.check_dimensions(3, 8, 1)
    with pytest.raises(ConfigError, match="dimensions: names 3 dimensions"):
        held.check_dimensions(4, 8, 4)
