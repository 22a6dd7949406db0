"""A resumed run may compute in other pieces than before: what it trains is the same but for
rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rlinf.cli.main import main

from . import reasoning_support, supervised_support, support

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Bound of the difference of metrics and weights: the same float32 numbers in another order."""

SPENT = {"actor/optimizer_steps", "train/rows"}


@dataclass(frozen=True)
class Kind:
    """A task of which runs are compared."""

    write: Callable[[Path], Path]
    length: str
    part: int
    whole: int
    changes: tuple[str, ...]
    weights: Callable[[Path], dict[str, np.ndarray]]
    words: tuple[str, ...] = ()


SEQUENCES = (
    "max_tokens_per_micro_batch=40", "gradient_checkpointing=true", "logits_per_chunk=100",
)  # fmt: skip
KINDS = {
    "embodied": Kind(
        support.write_recipe, "runner.total_env_steps", 256, 512,
        ("actor.micro_batch_size=8", "cluster.residency={actor: offload}",
         "actor.offload.optimizer=false"),
        support.weights,
    ),
    "behaviour_cloning": Kind(
        supervised_support.write_cloning, "runner.total_steps", 2, 4,
        ("actor.micro_batch_size=16",), supervised_support.weights,
    ),
    "sft": Kind(
        supervised_support.write_fine_tuning, "runner.total_steps", 2, 4,
        ("actor.micro_batch_size=null", *(f"actor.{each}" for each in SEQUENCES)),
        supervised_support.weights,
    ),
    "reasoning": Kind(
        reasoning_support.write_recipe, "runner.total_steps", 2, 3,
        ("reward.processes=2", "reward.deadline=30", "reward.start_deadline=100",
         "reward.memory_mib=2048", "rollout.engine.max_running_requests=3",
         *(f"{name}.{each}" for name in ("actor", "critic") for each in SEQUENCES)),
        reasoning_support.weights,
        ("algorithm={type: ppo}", "critic={n_minibatches: 2, optim: {lr: 1.0e-3}}"),
    ),
}  # fmt: skip


def trained(run: Path) -> list[dict[str, float]]:
    """What was logged of each training step; evaluations may be at the end of a part, too."""
    lines = [line for line in reasoning_support.untimed(run) if SPENT & line.keys()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("eval/", "validation/"))}
        for line in lines
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_in_other_pieces(name: str, tmp_path: Path) -> None:
    if name in ("sft", "reasoning"):
        pytest.importorskip("transformers")
    kind = KINDS[name]
    recipe = kind.write(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for run, length in ((whole, kind.whole), (parted, kind.part)):
        words = [*kind.words, f"{kind.length}={length}"]
        assert main(["train", str(recipe), *words, "--run-dir", str(run)]) == 0
    longer = f"{kind.length}={kind.whole}"
    assert main(["resume", str(parted), longer, *kind.changes]) == 0
    expected, found = trained(whole), trained(parted)
    assert len(expected) == len(found) > 1
    for wanted, got in zip(expected, found, strict=True):
        assert wanted.keys() == got.keys()
        for key, value in wanted.items():
            assert got[key] == pytest.approx(value, rel=RELATIVE, abs=ABSOLUTE), key
    before, after = kind.weights(whole), kind.weights(parted)
    for key, value in before.items():
        np.testing.assert_allclose(after[key], value, rtol=RELATIVE, atol=ABSOLUTE, err_msg=key)
