from __future__ import annotations

import importlib.util
import subprocess
import sys

import pydantic
import pytest

from rlinf.envs.base import REGISTRY
from rlinf.envs.config import EnvConfig
from rlinf.envs.metaworld import adapter as metaworld
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.processes.wire import decode_tree, encode_tree

GOOD = {"type": "metaworld", "options": {"task": "reach-v3"}, "max_episode_steps": 150}


def test_options_are_validated_with_defaults_filled_in():
    config = EnvConfig.model_validate(GOOD)
    assert config.adapter_options == metaworld.MetaWorldOptions(task="reach-v3")
    config.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "metawold"}, "unknown env type `metawold`; did you mean `metaworld`"),
        ({"options": {}}, "options.task"),
        ({"type": "panda_gym", "options": {}}, "registers it; for example PandaReachDense-v3"),
        ({"type": "pusht", "options": {"image": True}}, "did you mean `images`"),
        ({"options": {"task": "reach-v3", "imagess": True}}, "did you mean `images`"),
        ({"options": {"task": "reach-v3", "images": "yes"}}, "options.images"),
        ({"options": {"task": 3}}, "options.task"),
        ({"max_episode_steps": 0}, "greater than 0"),
        ({"max_episode_steps": 1.5}, "max_episode_steps"),
        ({"group_size": 0}, "group_size"),
        ({"processes": 0}, "processes"),
        ({"max_fault_rate": 1.5}, "max_fault_rate"),
        ({"step_deadline": 0}, "step_deadline"),
        ({"reward_scale": float("nan")}, "reward_scale"),
        ({"step_penalty": -1.0}, "greater than or equal to 0"),
        ({"autoreset": True}, "autoreset"),
    ],
)
def test_illegal_values_are_refused(change, message):
    with pytest.raises(pydantic.ValidationError) as caught:
        EnvConfig.model_validate({**GOOD, **change})
    assert message in f"{caught.value} {caught.value.errors()}"


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({"task": "reach-v2"}, 150, "did you mean `reach-v3`"),
        ({"task": "reach-v3"}, 501, "nearest: 500"),
        ({"task": "reach-v3", "camera": "corner9"}, 150, "corner2"),
        ({"task": "reach-v3", "images": True, "image_size": 8}, 150, "nearest: 32"),
        ({"task": "reach-v3", "states": False}, 150, "`states` or `images`"),
    ],
)
def test_illegal_simulator_options_are_refused_before_it_is_imported(options, steps, message):
    script = (
        "import sys, json\n"
        "from rlinf.envs.config import EnvConfig\n"
        "from rlinf.errors import ConfigError\n"
        f"config = EnvConfig(type='metaworld', options={options!r}, max_episode_steps={steps})\n"
        "try:\n    config.check()\nexcept ConfigError as error:\n    print(error)\n"
        "print('mujoco' in sys.modules, 'torch' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert message in result.stdout
    assert result.stdout.strip().endswith("False False")


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path))  # nothing is installed outside of this one
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mujoco" else real(name)
    )
    metaworld.task_names.cache_clear()
    with pytest.raises(MissingPackageError, match=r"\[metaworld\]"):
        EnvConfig.model_validate(GOOD).check()
    metaworld.task_names.cache_clear()


def test_entry_points_are_listed_beside_the_table(point):
    point()
    assert {"metaworld", "gymnasium", "point"} <= set(REGISTRY.names())
    assert REGISTRY.load("point").__name__ == "PointEnv"
    with pytest.raises(ConfigError, match=r"known: .*gymnasium"):
        REGISTRY.load("zzz")


def test_the_env_side_needs_numpy_and_gymnasium_alone():
    script = (
        "import sys\n"
        "import rlinf.envs.supervised.process, rlinf.envs.metaworld, rlinf.envs.gymnasium_env\n"
        "print([m for m in ('torch', 'pydantic', 'ray', 'mujoco') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_trees_survive_the_wire_and_objects_do_not():
    import numpy as np

    tree = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": {"c": None, "d": [1, 2.5, "x", True], "e": np.zeros((0, 4), np.uint8)},
        "f": np.float64(0.1),
        "g": np.array(3),
    }
    back = decode_tree(encode_tree(tree))
    assert np.array_equal(back["a"], tree["a"])
    assert back["a"].dtype == np.float32
    assert back["a"].flags.writeable
    assert back["b"]["c"] is None
    assert back["b"]["d"] == [1, 2.5, "x", True]
    assert back["b"]["e"].shape == (0, 4)
    assert back["f"] == 0.1
    assert back["g"].shape == ()
    with pytest.raises(TypeError, match="Python objects"):
        encode_tree({"a": np.array([object()])})
