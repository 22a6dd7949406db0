"""The page on environments of one's own: its files train, and its program has the policy act."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.warm import Warm

from .pages import ROOT, blocks

PAGE = ROOT / "docs/own-environment.md"
SMALL = (
    "runner.total_env_steps=6400", "evaluation.interval=2", "evaluation.periodic_episodes=16",
    "evaluation.episodes=16", "rollout.steps=100", "actor.global_batch_size=320",
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    shown = [block for block in blocks() if block.page == PAGE]
    for block in shown:
        info, _, name = block.info.partition(' title="')
        if name or info == "python":
            (tmp_path / (name.rstrip('"') or "program.py")).write_text(block.text)
    return tmp_path


def test_the_environment_is_trained_in_and_its_policy_acts(files: Path) -> None:
    """By the program that is installed, from the directory where the files lie."""
    program = Path(sys.executable).with_name("rlinf")

    def run(*words: str) -> str:
        done = Warm(words, directory=files)
        output, errors = (part.decode() for part in done.communicate(timeout=240))
        assert done.returncode == 0, output + errors
        return output

    assert sorted(each.name for each in files.iterdir()) == [
        "mine.yaml",
        "my_package.py",
        "program.py",
    ]
    assert "held-out episodes: success rate" in run(str(program), "train", "mine.yaml", *SMALL)
    acted = run("program.py")
    assert "step 4 tensor([[" in acted
