"""A checkpoint of another model is refused before its weights are touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main
from tests.runners.support import write_recipe


@pytest.fixture(scope="module")
def widened_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one training step whose config was edited to wider layers afterwards."""
    directory = tmp_path_factory.mktemp("other_model")
    run = directory / "run"
    recipe = str(write_recipe(directory))
    assert main(["train", recipe, "--run-dir", str(run), "runner.total_env_steps=128"]) == 0
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8")
    layers = "  hidden_sizes:\n  - 16\n  - 16\n"
    assert layers in text
    config.write_text(text.replace(layers, layers.replace("16", "24")), encoding="utf-8")
    return run


@pytest.mark.parametrize(
    ("verb", "words"), [("resume", ["runner.total_env_steps=256"]), ("eval", [])]
)
def test_a_checkpoint_of_another_model_is_a_user_error(
    capsys: pytest.CaptureFixture[str], widened_run: Path, verb: str, words: list[str]
) -> None:
    assert main([verb, str(widened_run), *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: The checkpoint is of another model:\n  of another shape:\n")
    assert "[16, 3] there, [24, 3] in the model" in message
    assert "Traceback" not in message
