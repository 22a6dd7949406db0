"""A reward function's file may move: what it holds, and which function is meant, may not change."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from rlinf.cli.tasks import read_config
from rlinf.config.base import StrictModel
from rlinf.config.dump import to_data
from rlinf.config.validate import validate
from rlinf.data.prompts.config import ChatTemplateConfig
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY as MODELS
from rlinf.monitor.run_origin import Origin
from rlinf.rewards.config import RewardConfig
from rlinf.runners.embodied_config import EmbodiedConfig

from ..runners.support import small_config
from ..runners.vla_support import REINFORCED


def rewards(function: str) -> RewardConfig:
    return RewardConfig.model_validate(
        {"functions": {"mine": {"type": "function", "function": function}}}
    )


def test_a_function_may_move_and_neither_change_nor_be_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample): return 1.0\ndef other(sample): return 0.0\n")
    began = Origin(**json.loads(json.dumps(asdict(Origin.of(rewards(f"{file}:score"))))))

    def go_on(function: str) -> None:
        config = rewards(function)
        began.refuse_other_config(config, (), why="a resumed run")
        began.refuse_other_files(config)

    go_on(f"{file}:score")
    moved = file.rename(tmp_path / "moved.py")
    go_on(f"{moved}:score")
    with pytest.raises(ConfigError, match=r"not changeable: functions\.mine\.function = .*:other"):
        go_on(f"{moved}:other")
    with pytest.raises(ConfigError, match=r"not changeable: functions\.mine\.function = math:sin"):
        go_on("math:sin")
    with pytest.raises(ConfigError, match=r"say where it is: functions\.mine\.function=PATH:NAME"):
        go_on(f"{file}:score")
    moved.write_text("def score(sample): return 2.0\ndef other(sample): return 0.0\n")
    with pytest.raises(
        ConfigError, match=r"not what the run began with: moved\.py differs.* --changed-code, or "
    ):
        go_on(f"{moved}:score")
    began.refuse_other_files(rewards(f"{moved}:score"), changed_code=True)


def test_a_key_that_came_later_had_its_default() -> None:
    config = rewards("math:sin")
    data = to_data(config)
    del data["functions"]["mine"]["weight"]
    began = Origin(data)
    began.refuse_other_config(config, (), why="a resumed run")
    data = to_data(config)
    data["functions"]["mine"]["weight"] = 2.0
    with pytest.raises(ConfigError, match=r"mine\.weight = 2\.0 \(it was 1\.0\)"):
        began.refuse_other_config(
            RewardConfig.model_validate(data), (), why="a resumed run"
        )  # fmt: skip


def test_a_key_that_was_given_up_is_told() -> None:
    config = rewards("math:sin")
    began = Origin({**to_data(config), "retired": 3})
    with pytest.raises(ConfigError, match=r"retired = None \(it was 3\)"):
        began.refuse_other_config(config, (), why="a resumed run")


ENV = """
import gymnasium

class Reach(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (2,))

gymnasium.register(id="Reach-v0", entry_point=Reach)
"""


def test_an_environment_in_a_file_of_ones_own_may_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "own_reach_env.py"
    file.write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"type": "gymnasium", "options": {"id": "own_reach_env:Reach-v0"}, "max_episode_steps": 5}
    config = EnvConfig.model_validate(own)
    began = Origin(**json.loads(json.dumps(asdict(Origin.of(config)))))
    assert list(began.files) == ["module own_reach_env"]
    began.refuse_other_config(config, (), why="a resumed run")
    began.refuse_other_files(config)
    file.write_text(ENV + "# 0.01 for 0.1")
    with pytest.raises(ConfigError, match=r"own_reach_env\.py is not what .* --changed-code"):
        began.refuse_other_files(config)
    began.refuse_other_files(config, changed_code=True)
    assert "own_reach_env.py is not what the run began with" in caplog.text
    installed = {**own, "options": {"id": "Pendulum-v1"}}
    assert not Origin.of(EnvConfig.model_validate(installed)).files


def test_a_value_that_is_refused_by_now_may_be_corrected_and_no_other_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = to_data(small_config(tmp_path))
    data["algorithm"]["clip_log_ratio_max"] = 0.1
    del data["model"]["any_action_limits"]
    began = Origin(data)
    began.refuse_other_config(small_config(tmp_path), (), why="a resumed run")
    told = "algorithm.clip_log_ratio_max: 0.1 is refused by now, it goes on with None"
    assert told in caplog.text
    other = small_config(tmp_path, "actor.optim.lr=0.5")
    with pytest.raises(
        ConfigError, match=r"not changeable: actor\.optim\.lr = 0\.5 \(it was .*\)\."
    ):
        began.refuse_other_config(other, (), why="a resumed run")
    # To evaluate nothing has to be corrected.
    config = validate(EmbodiedConfig, data, "a run", evaluated=True)
    began.refuse_other_config(config, (), why="a trained run", evaluated=True)
    with pytest.raises(ConfigError, match=r"changeable: algorithm\.clip_log_ratio_max = None \("):
        began.refuse_other_config(
            small_config(tmp_path), (), why="a trained run", evaluated=True
        )  # fmt: skip


def test_what_contradicts_itself_by_now_is_compared_by_what_it_had(tmp_path: Path) -> None:
    data = to_data(small_config(tmp_path))
    data["algorithm"]["critic_warmup_steps"] = 8
    del data["model"]["any_action_limits"]
    longer = small_config(
        tmp_path, "algorithm.critic_warmup_steps=8", "runner.total_env_steps=2048"
    )
    Origin(data).refuse_other_config(longer, ("runner",), why="a resumed run")
    data["actor"]["update_epoch"] = "2"  # another type
    data["runner"] = {"total_env_steps": 1024, "retired": {"interval": 3}}
    with pytest.raises(
        ConfigError, match=r"changeable: runner\.retired\.interval = None \(it was 3"
    ):
        Origin(data).refuse_other_config(longer, ("runner.total_env_steps",), why="a resumed run")


@pytest.mark.parametrize(
    ("kind", "settings", "horizon", "told"),
    [
        ("pi0", {}, 50, True),
        ("pi05", {}, 50, True),
        ("smolvla", {}, 50, True),
        ("pi0", {}, 10, False),
        ("pi05", {"action_horizon": 10}, 50, False),
        ("gr00t", {}, 50, False),
    ],
)
def test_a_horizon_that_was_taken_in_silence_may_be_told(
    tmp_path: Path, kind: str, settings: dict[str, int], horizon: int, told: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    section = {"type": kind, "path": str(tmp_path), "num_action_chunks": 4}
    kept = MODELS.load(kind).model_validate(section)
    given = MODELS.load(kind).model_validate({**section, "horizon": horizon})
    began = Origin(to_data(kept))
    with nullcontext() if told else pytest.raises(ConfigError, match=f"horizon = {horizon} \\(it"):
        began.refuse_other_config(given, (), why="a resumed run")


def test_a_template_may_be_told_the_date_that_it_wrote_by_itself() -> None:
    def told(**kwargs: str) -> ChatTemplateConfig:
        section = {"apply_chat_template": True, "chat_template_kwargs": kwargs}
        return ChatTemplateConfig.model_validate(section)

    day = told(date_string="26 Jul 2024")
    Origin(to_data(told())).refuse_other_config(day, (), why="a resumed run")
    for before, now in ((day, told(date_string="27 Jul 2024")), (told(), told(style="short"))):
        with pytest.raises(ConfigError, match=r"not changeable: chat_template_kwargs\.\w+ = "):
            Origin(to_data(before)).refuse_other_config(now, (), why="a resumed run")


def test_frozen_vision_that_was_adapted_may_be_told(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(REINFORCED)

    def begun(*overrides: str) -> StrictModel:
        model = ["model.type=openvla_oft", "~model.denoising_steps"]
        return read_config(str(recipe), [*model, *overrides])[2]

    frozen, lora = "model.freeze_vision=true", "actor.lora.rank=4"
    began = Origin(to_data(begun(frozen, lora)))
    began.refuse_other_config(begun(lora), (), why="a resumed run")
    with pytest.raises(ConfigError, match=r"not changeable: model\.freeze_vision = False \(it was"):
        Origin(to_data(begun(frozen))).refuse_other_config(begun(), (), why="a resumed run")
    with pytest.raises(ConfigError, match=r"not changeable: model\.freeze_vision = True \(it was"):
        Origin(to_data(begun(lora))).refuse_other_config(begun(frozen, lora), (), why="a run")
