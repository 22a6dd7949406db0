"""Components that give their memory back between phases: what decides it; no result changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rlinf.engines.hf import HFEngine
from rlinf.errors import UserError
from rlinf.flow import placed_config
from rlinf.runners.reasoning_config import ReasoningConfig

from . import off_policy_support, supervised_support, support
from .reasoning_support import assert_equal_runs, small_config, train

SHARED = "cluster.component_placement={'rollout,reward,actor': '0'}"


def residencies(config: ReasoningConfig) -> dict[str, str]:
    return {name: plan.residency for name, plan in config.plan.components.items()}


def test_on_cpu_everything_stays_unless_told(tmp_path: Path) -> None:
    config = small_config(tmp_path, SHARED)
    assert set(residencies(config).values()) == {"resident"}
    config = small_config(tmp_path, SHARED, "cluster.residency={'rollout,actor': offload}")
    assert residencies(config) == {"rollout": "offload", "reward": "resident", "actor": "offload"}
    header, *rows = config.placement_table()
    column = header.index("residency")
    assert [row[column] for row in rows] == ["offload", "resident", "offload"]


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_config, "accelerators_here", lambda: 2)


@pytest.mark.usefixtures("two_accelerators")
@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("component_placement={'rollout,reward,actor': '0'}", ("offload", "resident", "offload")),
        ("component_placement={'rollout,reward': '0', actor: '1'}", ("resident",) * 3),
        ("component_placement={rollout: '0-1', 'reward,actor': '1'}",
         ("offload", "resident", "offload")),
    ],
)  # fmt: skip
def test_on_accelerators_sharing_decides(
    tmp_path: Path, cluster: str, expected: tuple[str, ...]
) -> None:
    found = residencies(small_config(tmp_path, f"cluster.{cluster}"))
    assert tuple(found[name] for name in ("rollout", "reward", "actor")) == expected


@pytest.mark.usefixtures("two_accelerators")
def test_a_written_key_wins_over_sharing(tmp_path: Path) -> None:
    config = small_config(tmp_path, SHARED, "cluster.residency={actor: resident}")
    assert residencies(config) == {"rollout": "offload", "reward": "resident", "actor": "resident"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{actr: offload}", "does not know actr"),
        ("{critic: offload}", "does not know critic"),
        ("{reward: offload}", "reward has nothing to offload; components that have: rollout"),
        ("{actor: away}", "must be one of: resident, offload"),
    ],
)
def test_refused(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.residency") as refused:
        small_config(tmp_path, f"cluster.residency={value}")
    assert message in str(refused.value)


def test_of_an_embodied_run_the_trainer_alone_offloads(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="env has nothing to offload; components that have: actor"):
        support.small_config(tmp_path, "cluster.residency={env: offload}")
    assert support.small_config(tmp_path).plan.components["actor"].residency == "resident"
    away = ("cluster.residency={actor: offload}", "actor.offload.weights=false")
    assert support.small_config(tmp_path, *away).plan.components["actor"].residency == "offload"


PPO = ("algorithm={type: ppo, kl_reward_beta: 0.01}", "critic={optim: {lr: 1.0e-3}}")


@pytest.mark.parametrize(
    ("residency", "more"),
    [("{'rollout,actor': offload}", ()), ("{'rollout,actor,critic': offload}", PPO)],
    ids=["grpo", "ppo"],
)
def test_offloading_changes_no_bit(tmp_path: Path, residency: str, more: tuple[str, ...]) -> None:
    more = (*more, "runner.total_steps=2")
    kept = train(tmp_path / "kept", *more)
    away = train(tmp_path / "away", *more, f"cluster.residency={residency}", "runner.timeline=true")
    assert_equal_runs(kept, away)
    assert '"offload"' in (away / "timeline.json").read_text()


def cloning(directory: Path, *overrides: str) -> Path:
    directory.mkdir()
    recipe = supervised_support.write_cloning(directory)
    supervised_support.run_recipe(recipe, directory / "run", "runner.total_steps=3", *overrides)
    return directory / "run"


def acting(directory: Path, *overrides: str) -> Path:
    return off_policy_support.train(directory, "runner.total_env_steps=512", *overrides)


@pytest.mark.parametrize(
    ("run", "support"),
    [(acting, support), (cloning, supervised_support)],
    ids=["off_policy", "behaviour_cloning"],
)
def test_offloading_the_trainer_of_a_policy_changes_no_bit(
    tmp_path: Path, run: Callable[..., Path], support: ModuleType
) -> None:
    kept = run(tmp_path / "kept")
    away = run(tmp_path / "away", "cluster.residency={actor: offload}", "runner.timeline=true")
    support.assert_equal_runs(kept, away)
    assert '"offload"' in (away / "timeline.json").read_text()


def test_an_engine_may_forget_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do that sleep on an accelerator: they get weights before each rollout."""
    steps = "runner.total_steps=3"
    kept = train(tmp_path / "kept", steps)
    release = HFEngine.release_memory

    def forget(engine: HFEngine) -> None:
        release(engine)
        for parameter in engine._model.parameters():
            parameter.data.fill_(float("nan"))

    monkeypatch.setattr(HFEngine, "release_memory", forget)
    assert_equal_runs(kept, train(tmp_path / "away", steps, "cluster.residency={rollout: offload}"))
