"""A package that cannot be used is in nobody's way until it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf.algorithms.config import PPOConfig
from rlinf.algorithms.ppo import PPO
from rlinf.cli.main import main
from rlinf.config.registry import Registry, load_component
from rlinf.errors import ConfigError
from rlinf.models.policy import Policy
from tests.packages import write_entry_points

GROUPS = {
    "envs": "rlinf.envs",
    "models": "rlinf.models",
    "algorithms": "rlinf.algorithms",
    "loggers": "rlinf.loggers",
}
ASK = {
    "envs": "env.train.type",
    "models": "model.type",
    "algorithms": "algorithm.type",
    "loggers": "logger.backends",
}
REASONS = {
    "unimportable": "cannot be imported: RuntimeError: no such simulator",
    "absent": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    "function": "is no subclass of rlinf.",
}


@pytest.fixture(autouse=True)
def _broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "unimportable": "broken_things:Env",
        "absent": "no_such_module:Thing",
        "function": "textwrap:dedent",
    }
    write_entry_points(tmp_path, "broken-things", dict.fromkeys(GROUPS.values(), points))
    (tmp_path / "broken_things.py").write_text("raise RuntimeError('no such\\nsimulator')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()


@pytest.mark.parametrize("kind", GROUPS)
def test_list_shows_it_in_one_line(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, reason in REASONS.items():
        text = " ".join("\n".join(lines).split())
        assert f"{name} " in text
        assert f"(entry point {GROUPS[kind]} of broken-things) {reason}" in text


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("kind", GROUPS)
def test_asked_for_by_name_it_is_a_user_error(
    capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    value = f"[{name}]" if kind == "loggers" else name
    assert main(["train", "quickstart", "--dry-run", f"{ASK[kind]}={value}"]) == 2
    message = capsys.readouterr().err
    assert f"`{name}` is broken: " in message
    assert f"(entry point {GROUPS[kind]} of broken-things) {REASONS[name]}" in message
    assert "Traceback" not in message


def test_everything_else_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--dry-run"]) == 0
    assert main(["train", "quickstart", "--dry-run", "gae_lambda=1"]) == 2
    assert "did you mean `algorithm.gae_lambda`?" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["model", "env.train.options", "algorithm"])
def test_explain_shows_it_in_one_line(capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert main(["explain", key]) == 0
    lines = capsys.readouterr().out.splitlines()
    for reason in REASONS.values():
        assert sum(reason in line for line in lines) == 1


def test_a_key_that_a_broken_package_may_have_is_not_found_and_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "model.bandwidth"]) == 2
    message = capsys.readouterr().err
    assert "no key `model.bandwidth`" in message
    assert "model `absent` is broken" in message


def test_the_projects_own_names_cannot_be_taken() -> None:
    registry = Registry("thing", "rlinf.models", {"absent": "collections:OrderedDict"}, dict)
    assert registry.load("absent").__name__ == "OrderedDict"
    with pytest.raises(ConfigError, match="unknown thing `functoin`; did you mean `function`"):
        registry.load("functoin")


class Half(Policy):
    """Has some methods of a policy."""

    def sample(self, observations: Any, noise: Any) -> Any:
        return None


class Unmakeable(PPO):
    """Is made with another list of arguments."""

    def __init__(self, config: Any) -> None:
        raise AssertionError


class Uncallable(PPO):
    """Has a loss of its own that is called without what it is divided by."""

    def loss(self, evaluation: Any, batch: Any) -> Any:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "Unmakeable",
            r"__init__ cannot be called as __init__\(config, group_size=…\): got",
        ),
        ("Uncallable", r"loss cannot be called as loss\(evaluation, batch, normalizer=…\): got an"),
    ],
)
def test_an_algorithm_that_a_run_could_not_call_is_refused(name: str, told: str) -> None:
    class Section(PPOConfig):
        implementation = f"{__name__}:{name}"

    with pytest.raises(ConfigError, match=told) as refused:
        Section().build(family="actions")
    assert refused.value.key == "type"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("collections:OrderedDict", r"is no subclass of rlinf\.models\.policy\.Policy"),
        (f"{__name__}:Half", r"Half leaves out evaluate_actions, .*, which every rlinf"),
    ],
)
def test_a_class_that_is_no_whole_policy_is_refused_by_what_it_lacks(
    reference: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        load_component(reference, Policy, Policy.__init__)
    assert refused.value.key == "type"


SECTIONS = """
from typing import Literal
from rlinf.algorithms.base_config import AlgorithmConfig
from rlinf.models.config import GaussianPolicyConfig

class Whole(GaussianPolicyConfig):
    implementation = "half_done.policy:Policy"
    type: Literal["whole"] = "whole"

class Untyped(GaussianPolicyConfig):
    implementation = "half_done.policy:Policy"

class Astray(GaussianPolicyConfig):
    implementation = "half_done.polices:Policy"
    type: Literal["astray"] = "astray"

class Misspelt(GaussianPolicyConfig):
    implementation = "half_done.policy:Polciy"
    type: Literal["misspelt"] = "misspelt"

class Unsaid(AlgorithmConfig):
    type: Literal["unsaid"] = "unsaid"
"""
POLICY = """
from rlinf.models.gaussian import GaussianPolicy

raise RuntimeError("heavy")

class Policy(GaussianPolicy): ...
"""
ENVS = """
from dataclasses import dataclass
from rlinf.envs.base import SimulatorEnv

@dataclass(frozen=True)
class Options: ...

class Idle(SimulatorEnv):
    Options = Options
    def reset(self, *, seed=None, options=None): ...
    def step(self): ...

class Still(SimulatorEnv):
    Options = Options
    def reset(self, *, seed=None, options=None): ...
    def step(self, action): ...

class Endless(SimulatorEnv):
    Options = Options
    def step(self, action): ...

class Unseeded(SimulatorEnv):
    Options = Options
    def reset(self): ...
    def step(self, action): ...

class Stepless(SimulatorEnv):
    Options = Options
    def reset(self, *, seed=None): ...

class Bare(SimulatorEnv): ...

class Undecorated(SimulatorEnv):
    class Options: ...
"""
RECIPE = """
task: embodied
runner: {{total_env_steps: 64}}
env: {{num_envs: 2, train: {{type: {env}, max_episode_steps: 10}}}}
rollout: {{steps: 8}}
model: {{type: {model}}}
algorithm: {{type: {algorithm}}}
actor: {{global_batch_size: 16}}
"""
NOTICED = {
    "model=untyped": 'write in it: type: Literal["untyped"] = "untyped"',
    "model=astray": "there is no module half_done.polices; did you mean `half_done.policy`?",
    "model=misspelt": "half_done.policy has no `Polciy`; did you mean `Policy`?",
    "algorithm=unsaid": "implementation of half_done.sections.Unsaid: `` is not of the form",
    "env=idle": "half_done.envs.Idle.step is called with (action), which it does not take",
    "env=endless": "half_done.envs.Endless has no method `reset`",
    "env=unseeded": "half_done.envs.Unseeded.reset is called with (seed), which it does not",
    "env=stepless": "half_done.envs.Stepless has no method `step`",
    "env=bare": "of half-done) has no dataclass of its options by the name of `Options`",
    "env=undecorated": "of half-done) has no dataclass of its options by the name of `Options`",
}


def recipe(directory: Path, **named: str) -> str:
    path = directory / "recipe.yaml"
    given = {"env": "still", "model": "whole", "algorithm": "grpo", **named}
    text = RECIPE.format(**given)
    if given["algorithm"] == "grpo":
        text = text.replace("max_episode_steps: 10", "max_episode_steps: 8, group_size: 2")
    path.write_text(text)
    return str(path)


@pytest.fixture
def _half_done_package(tmp_path: Path) -> Iterator[None]:
    package = tmp_path / "half_done"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "sections": SECTIONS,
        "policy": POLICY,
        "envs": ENVS,
    }.items():
        (package / f"{name}.py").write_text(text)
    classes = {
        "rlinf.models": ("sections", ["Whole", "Untyped", "Astray", "Misspelt"]),
        "rlinf.algorithms": ("sections", ["Unsaid"]),
        "rlinf.envs": (
            "envs",
            ["Still", "Idle", "Endless", "Unseeded", "Stepless", "Bare", "Undecorated"],
        ),
    }
    points = {
        group: {each.lower(): f"half_done.{file}:{each}" for each in names}
        for group, (file, names) in classes.items()
    }
    write_entry_points(tmp_path, "half-done", points)
    importlib.invalidate_caches()
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "half_done"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_half_done_package")
@pytest.mark.parametrize("wrong", NOTICED)
def test_a_dry_run_notices_what_is_half_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    section, _, name = wrong.partition("=")
    assert main(["train", recipe(tmp_path, **{section: name}), "--dry-run"]) == 2
    assert NOTICED[wrong] in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("_half_done_package")
def test_a_dry_run_reads_an_implementation_and_does_not_run_it(tmp_path: Path) -> None:
    assert main(["train", recipe(tmp_path), "--dry-run"]) == 0
    assert "half_done.policy" not in sys.modules
