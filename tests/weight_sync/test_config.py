"""The config section: found by name, strict, and read without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import pytest
from pydantic import ValidationError

from rlinf.config.base import StrictModel
from rlinf.config.component import Component
from rlinf.weight_sync.auto import choose
from rlinf.weight_sync.config import REGISTRY, AutoConfig, PatchConfig, WeightSyncConfig
from rlinf.weight_sync.link import Place


class Recipe(StrictModel):
    weight_sync: Annotated[WeightSyncConfig, Component(REGISTRY)] = AutoConfig()


@pytest.mark.parametrize("name", REGISTRY.names())
def test_a_section_is_read_by_its_type(name):
    found = Recipe.model_validate({"weight_sync": {"type": name}}).weight_sync
    assert type(found) is REGISTRY.load(name)
    assert found.type == name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "pach"}, "did you mean `patch`"),
        ({"type": "bucket", "bucket_size": 0}, "greater than or equal to 1"),
        ({"type": "reference", "bucket_size": 5}, "Extra inputs"),
        ({"type": "patch", "transport": "nccl"}, "patches do not travel by nccl"),
        ({"type": "shared_memory", "reads": "both"}, "'copy' or 'view'"),
    ],
)
def test_what_is_not_legal_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({"weight_sync": section})


def test_the_config_imports_no_torch():
    code = "import sys, rlinf.weight_sync.config as c; c.AutoConfig();"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(0, 1, True)], "reference"),
        ([(0, 2, False), (0, 3, False)], "shared_memory"),
        ([(0, 2, False), (1, 3, False)], "patch"),
    ],
)
def test_auto_chooses_by_place(others, expected):
    config = AutoConfig(retry_after=3, reads="view")
    own = Place(node=0, process=1, in_process=others[0][2])
    chosen = choose(config, own, [Place(node=n, process=p, in_process=i) for n, p, i in others])
    assert chosen.type == expected
    if isinstance(chosen, PatchConfig):
        assert chosen.retry_after == 3
    if expected == "shared_memory":
        assert chosen.reads == "view"
