"""The stand-ins of ``tests/envs/recorded`` against the sources of the real packages.

The sources are read, not imported: they want a GPU and assets. They are fetched with

    pip download --no-deps --dest DIR rlinf-robotwin-runtime==0.1.3 rlinf-robocasa365==1.0.1

and ``RLINF_TEST_SOURCES=DIR`` names where the wheels lie; without it the tests are skipped.
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf.envs.household import robocasa, robotwin

STAND_INS = Path(__file__).with_name("recorded")
WHEELS = {"robotwin": "rlinf_robotwin_runtime-0.1.3", "robocasa": "rlinf_robocasa365-1.0.1"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the real package of a name lies, unpacked."""
    target = tmp_path_factory.mktemp("sources")

    def find(name: str) -> Path:
        folder = Path(os.environ.get("RLINF_TEST_SOURCES", "."))
        wheels = sorted(folder.glob(f"{WHEELS[name]}-*.whl"))
        if not wheels:
            pytest.skip(f"no {WHEELS[name]} in RLINF_TEST_SOURCES; see this file's first lines")
        if not (target / name).is_dir():
            zipfile.ZipFile(wheels[0]).extractall(target)
        return target / name

    return find


Signature = list[tuple[str, Any]]


def signatures(file: Path) -> dict[str, Signature]:
    """Arguments and their defaults of every function of a file, by ``Class.function``."""
    found: dict[str, Signature] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                given = node.args
                defaults: list[Any] = [ast.literal_eval(each) for each in given.defaults]
                names = [each.arg for each in given.args]
                plain = ["required"] * (len(names) - len(defaults))
                found[prefix + node.name] = list(zip(names, plain + defaults, strict=True))

    visit(ast.parse(file.read_text()).body, "")
    return found


def keys_of(file: Path, function: str) -> set[str]:
    """Texts that stand as a key in a function: of a mapping, of an entry, of ``get``."""
    name = function.rpartition(".")[2]
    (node,) = [
        each
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    places = [each.slice for each in ast.walk(node) if isinstance(each, ast.Subscript)]
    places += [
        key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys if key
    ]
    places += [
        each.args[0]
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in ("get", "pop")
        and each.args
    ]
    return {
        each.value
        for each in places
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


# -- RoboTwin -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        "VectorEnv.__init__", "VectorEnv.step", "VectorEnv.reset", "VectorEnv.get_obs",
        "VectorEnv.close", "VectorEnv.check_seeds", "SubEnv.__init__", "SubEnv.reset",
        "SubEnv.step", "SubEnv.get_obs", "SubEnv.close", "SubEnv.check_seed", "update_obs",
    ],
)  # fmt: skip
def test_robotwin_signatures(source: Callable[[str], Path], function: str) -> None:
    real = signatures(source("robotwin") / "envs/vector_env.py")[function]
    assert signatures(STAND_INS / "robotwin/envs/vector_env.py")[function] == real


@pytest.mark.parametrize("function", ["update_obs", "check_seed"])
def test_robotwin_keys(source: Callable[[str], Path], function: str) -> None:
    real = keys_of(source("robotwin") / "envs/vector_env.py", function)
    assert keys_of(STAND_INS / "robotwin/envs/vector_env.py", function) == real


def test_robotwin_what_the_adapter_counts_on(source: Callable[[str], Path]) -> None:
    """The seed that was taken, chunks, success that repeats, and what the constructor writes."""
    task = source("robotwin") / "envs/_base_task.py"
    text = ast.unparse(ast.parse(task.read_text()))
    assert "self.ep_num = kwags.get('now_ep_num', 0)" in text
    chunk = text[text.index("def gen_sparse_reward_data") :]
    chunk = chunk[: chunk.index("\n    def ")]
    assert "self.take_action_cnt += chunk_actions.shape[0]" in chunk
    for text_of in ("reward = np.array([1], dtype=np.float32)",
                    "termination = np.array([1], dtype=np.int32)",
                    "infos['success'] = True"):  # fmt: skip
        assert chunk.count(text_of) == 3  # before, within and behind the chunk
    vector = ast.unparse(ast.parse((source("robotwin") / "envs/vector_env.py").read_text()))
    assert "self.task.setup_demo(now_ep_num=trial_seed, seed=trial_seed, **self.args)" in vector
    assert "self.task.step_lim = self.args['step_lim']" in vector
    assert "args['save_path'] += f\"/{args['task_name']}_reward\"" in vector
    assert "ROBOTWIN_ASSETS_ROOT" in vector
    words = (source("robotwin") / "description/instructions.py").read_text()
    assert "random.Random(seed)" in words


def test_robotwin_tasks_and_settings(source: Callable[[str], Path]) -> None:
    real = source("robotwin")
    limits = robotwin.step_limits(real)
    assert limits == robotwin.step_limits(STAND_INS / "robotwin")
    assert len(limits) == 50
    for task in limits:
        assert f"class {task}(Base_Task)" in (real / f"envs/{task}.py").read_text()
    for config in robotwin.CONFIGS:
        ours, theirs = (
            yaml.safe_load((folder / f"configs/task/{config}.yml").read_text())
            for folder in (STAND_INS / "robotwin", real)
        )
        assert ours.keys() <= theirs.keys()
        assert ours["camera"] == theirs["camera"]
        assert ours["save_path"] == theirs["save_path"]
    cameras = yaml.safe_load((real / "configs/task/_camera_config.yml").read_text())
    assert (cameras["D435"]["w"], cameras["D435"]["h"]) == (320, 240)
    assert (real / "assets.py").read_text().count('"assets/') == len(robotwin.ASSETS)
    for folder in robotwin.ASSETS:
        assert f'"assets/{folder}"' in (real / "assets.py").read_text()


# -- RoboCasa -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        "RoboCasaGymEnv.__init__", "RoboCasaGymEnv.reset", "RoboCasaGymEnv.step",
        "RoboCasaGymEnv.render", "RoboCasaGymEnv.close", "PandaOmronKeyConverter.map_obs",
        "PandaOmronKeyConverter.unmap_action", "create_robocasa_gym_env_class",
    ],
)  # fmt: skip
def test_robocasa_signatures(source: Callable[[str], Path], function: str) -> None:
    real = signatures(source("robocasa") / "wrappers/gym_wrapper.py")[function]
    assert signatures(STAND_INS / "robocasa/wrappers/gym_wrapper.py")[function] == real


@pytest.mark.parametrize("function", ["map_obs", "unmap_action"])
def test_robocasa_keys_and_thresholds(source: Callable[[str], Path], function: str) -> None:
    real = source("robocasa") / "wrappers/gym_wrapper.py"
    ours = STAND_INS / "robocasa/wrappers/gym_wrapper.py"
    assert keys_of(real, function) == keys_of(ours, function)
    texts = [ast.unparse(ast.parse(file.read_text())) for file in (real, ours)]
    for name in ("gripper_close", "control_mode"):
        assert all(f"-1.0 if input_action['action.{name}'] < 0.5 else 1.0" in t for t in texts)


def test_robocasa_keys_of_the_adapter_are_real(source: Callable[[str], Path]) -> None:
    wrapper = source("robocasa") / "wrappers/gym_wrapper.py"
    assert {name for name, _ in robocasa.ACTIONS} <= keys_of(wrapper, "unmap_action")
    mapped = keys_of(wrapper, "map_obs")
    renamed = {"state." + key[5:] for key in mapped if key.startswith(("hand.", "body."))}
    assert renamed == {name for name, _ in robocasa.STATES["gym"]}
    text = wrapper.read_text()
    assert all(f'"{camera}"' in text for camera in robocasa.CAMERAS.values())
    assert "annotation.human.task_description" in text
    env = (source("robocasa") / "utils/env_utils.py").read_text()
    for split in robocasa.SPLITS:
        assert f'split == "{split}"' in env
    assert "ignore_done=True" in env  # no episode ends by itself


def test_robocasa_tasks_are_read_from_its_source(source: Callable[[str], Path]) -> None:
    real = robocasa.horizons(source("robocasa"))
    assert len(real) == 317
    assert robocasa.horizons(STAND_INS / "robocasa").items() <= real.items()


def test_robocasa_assets_come_to_where_the_adapter_looks(source: Callable[[str], Path]) -> None:
    folder = source("robocasa")
    script = (folder / "scripts/download_kitchen_assets.py").read_text()
    for asset in robocasa.ASSETS:
        assert f'"models/assets/{asset}' in script
        assert not (folder / "models/assets" / asset).exists()  # not in the package itself
