"""The config sections: what they refuse, and what they do not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.rewards.config import RewardConfig
from rlinf.rewards.protocol import REGISTRY

LENGTH = {"type": "length", "max_length": 10, "cache_length": 5}


def read(**functions) -> RewardConfig:
    return validate(RewardConfig, {"functions": functions}, "test")


def test_every_reward_is_usable():
    names = ["code", "exact_match", "format", "function", "group_function", "length", "math"]
    assert REGISTRY.names() == names
    assert all(not isinstance(found, ConfigError) for _, found in REGISTRY.usable())


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"type": "maths"}, "did you mean `math`"),
        ({}, "does not say which reward"),
        ({"type": "math", "max_value": -2.0}, "nearest: 0.0"),
        ({"type": "math", "weight": float("nan")}, "finite"),
        ({"type": "math", "digit": 3}, "digit"),
        ({"type": "math", "require_boxed": True, "tail": 9}, "no effect without require_boxed: f"),
        ({"type": "exact_match", "pattern": "x"}, "no effect without extract: pattern"),
        ({"type": "exact_match", "extract": "pattern"}, "needs one"),
        ({"type": "exact_match", "extract": "pattern", "pattern": "("}, "no regular expression"),
        ({"type": "exact_match", "extract": "pattern", "pattern": "(a)(b)"}, "2 groups"),
        ({"type": "exact_match", "found_value": 2.0}, "nearest: 1.0"),
        ({"type": "format", "form": "pattern"}, "write both or none"),
        ({"type": "format", "form": "boxed", "think_in_prompt": True}, "no effect"),
        ({**LENGTH, "cache_length": 11}, "nearest: 10"),
        ({"type": "length"}, "max_length"),
        ({"type": "code", "total_seconds": 1.0}, "nearest: 6.0"),
        ({"type": "function", "function": "nothing"}, "names no function.* nothing:NAME"),
        ({"type": "function", "function": "rw.py:"}, r"names no function.* rw\.py:NAME"),
    ],
)
def test_what_cannot_be_meant_is_refused(section, reason):
    with pytest.raises(ConfigError, match=reason):
        read(mine=section)


def test_no_function_is_refused():
    with pytest.raises(ConfigError, match="functions"):
        read()


def test_a_deadline_below_the_functions_own_limits_is_refused():
    functions = {"math": {"type": "math", "seconds": 8.0}, "length": LENGTH}
    with pytest.raises(ConfigError, match=r"math 8 s\).*nearest: 13"):
        validate(RewardConfig, {"functions": functions, "deadline": 12.0}, "test")
    assert validate(RewardConfig, {"functions": functions, "deadline": 13.0}, "test")


@pytest.mark.parametrize(
    ("section", "key", "reason"),
    [
        (
            {"type": "function", "function": "no_such_module:f"},
            "functions.mine.function",
            "no module",
        ),
        ({"type": "code", "python": "/no/python"}, "functions.mine.python", "cannot run"),
    ],
)
def test_check_finds_what_is_missing_on_this_machine(section, key, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        read(mine=section).check()
    assert caught.value.key == key


def test_a_file_that_imports_what_is_not_there_is_refused_without_being_run(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import json, torhc\ndef score(sample): ...\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be imported: there is no module torhc"):
        read(mine={"type": "function", "function": f"{mine}:score"}).check()
    mine.write_text("try:\n    import torhc\nexcept ImportError: ...\ndef score(sample): ...\n")
    read(mine={"type": "function", "function": f"{mine}:score"}).check()


def test_check_accepts_what_is_here():
    read(math={"type": "math"}, code={"type": "code"}, length=LENGTH).check()


def test_a_config_survives_the_way_to_a_process():
    config = read(math={"type": "math", "weight": 0.5}, code={"type": "code"}, length=LENGTH)
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_config_imports_nothing_heavy():
    script = (
        "import sys, rlinf.rewards.config, rlinf.rewards.pool\n"
        "print(sorted({'torch', 'numpy', 'sympy', 'math_verify'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
